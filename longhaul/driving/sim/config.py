"""Simulator configuration and its validation."""

from __future__ import annotations

import math
from dataclasses import dataclass

from longhaul.driving.scenario.scenario import CANDIDATES, CONTROLS
from longhaul.runtime import config_fields
from longhaul.runtime.config_fields import nested, setting
from longhaul.runtime.errors import FieldError

MAX_WAYPOINTS = 20

HELD_OUT = 1_000_000
"""Generated seeds from here on are for evaluation only; a run trains on seeds below."""

GOALS = ("remove", "stop", "respawn")

CRASHES = ("remove", "stop")

EVENTS = ("collision", "offroad", "red_light", "goal")


@dataclass(frozen=True)
class Weights:
    """Reward weights. Events count once an episode."""

    progress: float = setting(0.1, "reward for a metre of the route, not beyond its end; a price where the log stands")
    collision: float = setting(-4.0, "reward for a collision")
    offroad: float = setting(-4.0, "reward for leaving the road")
    red_light: float = setting(-4.0, "reward for running a red light")
    goal: float = setting(2.0, "reward for reaching the goal")
    discomfort: float = setting(-0.01, "reward for each exceeded limit of comfort, a step, at most twice")
    haste: float = setting(-0.05, "reward for needed hard braking, a step, by its excess, at most twice")
    lateral: float = setting(-0.01, "reward for a metre beside the route, a step, at most 4")
    heading: float = setting(-0.02, "reward for 1 - cos of the angle to the route, a step")
    speeding: float = setting(0.0, "reward for a m/s above the speed limit, a step, at most 4")
    unease: float = setting(0.0, "reward for a step outside nuPlan's limits of comfort")
    near_collision: float = setting(0.0, "reward for a step with a time to collision below 0.95 s")
    unsafe: float = setting(0.0, "reward for a step whose command the safety check replaces")

    @property
    def conduct(self) -> bool:
        """True if a term needs `reward.Conduct`; a weight that is an array may be any number."""
        terms = (self.speeding, self.unease, self.near_collision)
        return any(not isinstance(term, float) or term != 0.0 for term in terms)


ACTIONS = ("discrete", "continuous", "joint")

TRAFFICS = ("log", "idm", "constant")
DRIVERS = ("policy", "log", "idm", "constant")
EXPERTS = ("log", "idm")
CHECKED = ("bicycle", "steering")
"""Dynamics whose commands `Config.safety` can replace: they hold an acceleration."""
DYNAMICS = ("bicycle", "steering", "delta", "jerk")


@dataclass(frozen=True)
class Config:
    """One way to drive in a bank."""

    agents: int = setting(1, "controlled agents of a world; 1 is the ego alone", least=1)
    traffic: str = setting(
        "log", "behaviour of the others: the log, Intelligent Driver Model, or constant velocity", choices=TRAFFICS
    )
    driver: str = "policy"
    """Driver of the agents: the "policy", or a baseline that ignores actions: "log", "idm", "constant" (speed)."""
    expert: str = setting(
        "log", "expert of imitation: the log, or the Intelligent Driver Model along the route", choices=EXPERTS
    )
    control: str = setting("vehicles", "kinds of agents: vehicles, or all that move", choices=tuple(CONTROLS))
    dynamics: str = setting(
        "bicycle", "model of motion: by acceleration and curvature, steering, displacement, or jerk", choices=DYNAMICS
    )
    actions: str = setting("discrete", "action space of the policy", choices=ACTIONS)
    """"discrete": an index for each number of a command; "joint": one for all; "continuous": all within [-1, 1]."""
    terminations: tuple[str, ...] = setting(EVENTS, "events that end an episode", choices=EVENTS)
    goal: str = setting("remove", "fate of an agent at its goal: removed, stopped, or given a new one", choices=GOALS)
    safety: bool = setting(False, "commands that would lead into a collision or over a red light replaced, by `safety`")
    crash: str = setting("remove", "fate of an agent that ends by another event: removed, or stopped", choices=CRASHES)
    conditioning: bool = setting(False, "reward weights drawn per driver, and observed by it")
    reward: str | None = setting(None, "your own reward in place of the weighted terms, module:name")
    weights: Weights = nested(Weights(), "reward_")
    neighbours: int = setting(8, "nearest others that an agent sees", least=1)
    waypoints: int = setting(10, "points of the route ahead that it sees", least=1, most=MAX_WAYPOINTS)
    speed_limit: bool = setting(False, "speed limit of the nearest lane observed by an agent")
    road_points: int = setting(
        0, "pieces of road that an agent sees around it; 200 reach about 60 m", least=0, most=CANDIDATES
    )
    observation_noise: tuple[float, float, float] = setting(
        (0.0, 0.0, 0.0), "deviations of others' observed position (m), heading (rad) and velocity (m/s)", least=0
    )
    observation_mask: float = setting(
        0.0, "chance that an agent misses one of the others, or a piece of road, in a step", least=0, most=1
    )
    bystanders: tuple[float, float] = setting(
        (0.0, 0.0),
        "chances that in a world of training half of the agents replay their log, or keep their velocity",
        least=0,
        most=1,
    )
    start_offset: tuple[float, float] = setting(
        (0.0, 0.0), "deviations of where agents of training begin: m beside their log, rad", least=0
    )
    start_speed: float = setting(
        0.0, "chance that an agent of training begins at another speed: none to 1.2 times its log's", least=0, most=1
    )
    view_range: float | None = setting(
        None, "metres beyond which an agent sees neither others nor road; none: any", above=0
    )
    view_angle: float = setting(
        2.0 * math.pi, "radians of an agent's field of view, around straight ahead", above=0, most=2.0 * math.pi
    )
    view_occlusion: bool = setting(False, "occlusion: boxes hide agents behind them")

    @property
    def draws(self) -> bool:
        """True if a key is needed for what agents see."""
        return any(self.observation_noise) or self.observation_mask > 0.0

    @property
    def limited(self) -> bool:
        return self.view_range is not None or self.view_angle < 2.0 * math.pi

    @property
    def perfect(self) -> bool:
        """True if agents see everything as it is."""
        return not (self.draws or self.limited or self.view_occlusion)


def check_settings(config: Config) -> None:
    """Raises FieldError where a setting is out of bounds, whatever the bank."""
    if config.driver not in DRIVERS:
        raise FieldError("driver", repr(config.driver), f"it must be one of {', '.join(DRIVERS)}")
    if len(config.observation_noise) != 3:
        raise FieldError("observation_noise", config.observation_noise, "give three deviations: m, rad, m/s")
    if len(config.bystanders) != 2 or sum(config.bystanders) > 1.0:
        raise FieldError("bystanders", config.bystanders, "give two chances whose sum is at most 1: log, velocity")
    if len(config.start_offset) != 2:
        raise FieldError("start_offset", config.start_offset, "give two deviations: m, rad")
    if config.safety and config.dynamics not in CHECKED:
        raise FieldError("dynamics", repr(config.dynamics), f"safety checks the commands of {', '.join(CHECKED)} alone")
    config_fields.check(config)
