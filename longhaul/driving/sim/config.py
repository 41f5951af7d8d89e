"""Simulator configuration and its validation."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from longhaul.driving.scenario.scenario import CANDIDATES, CONTROLS

MAX_WAYPOINTS = 20


GOALS = ("remove", "stop", "respawn")


CRASHES = ("remove", "stop")


class Sight(NamedTuple):
    """Limits of what agents see. The defaults see everything."""

    noise: tuple[float, float, float] = (0.0, 0.0, 0.0)  # standard deviations: position m, heading rad, velocity m/s
    mask: float = 0.0  # the chance that one of the others, or a piece of road, is missed in a step
    reach: float = math.inf  # m, to the middle of what is seen
    angle: float = 2.0 * math.pi  # rad, of the field of view around straight ahead
    occlusion: bool = False  # whether boxes hide who is behind them

    @property
    def draws(self) -> bool:
        """True if a key is needed."""
        return any(self.noise) or self.mask > 0.0

    @property
    def limited(self) -> bool:
        return self.reach < math.inf or self.angle < 2.0 * math.pi

    @property
    def perfect(self) -> bool:
        return not (self.draws or self.limited or self.occlusion)


def check_sight(sight: Sight) -> None:
    """Raises ValueError, `name is value: remedy` by the names of the simulator's config, where nothing can see so."""
    if len(sight.noise) != 3 or not all(0.0 <= deviation < math.inf for deviation in sight.noise):
        raise ValueError(
            f"observation_noise is {sight.noise}; give three standard deviations of at least 0: m, rad, m/s"
        )
    if not 0.0 <= sight.mask <= 1.0:
        raise ValueError(f"observation_mask is {sight.mask}; it must be 0 .. 1")
    if not sight.reach > 0.0:
        raise ValueError(f"view_range is {sight.reach}; it must be above 0")
    if not 0.0 < sight.angle <= 2.0 * math.pi:
        raise ValueError(f"view_angle is {sight.angle}; it must be above 0 and at most 2 pi")


EVENTS = ("collision", "offroad", "red_light", "goal")


@dataclass(frozen=True)
class Weights:
    """Reward weights. Events count once an episode."""

    progress: float = 0.1  # a metre along the route, not beyond its end
    collision: float = -4.0
    offroad: float = -4.0
    red_light: float = -4.0
    goal: float = 2.0
    discomfort: float = -0.01  # each limit of comfort exceeded by itself, at most twice
    haste: float = -0.05  # needed braking (`Features.braking`) above HARD, in parts of HARD, at most twice
    lateral: float = -0.01  # a metre beside the route, at most 4
    heading: float = -0.02  # 1 - cos of the angle to the route


ACTIONS = ("discrete", "continuous", "joint")


TRAFFICS = ("log", "idm", "constant")
DRIVERS = ("policy", "log", "idm", "constant")
EXPERTS = ("log", "idm")
DYNAMICS = ("bicycle", "steering", "delta", "jerk")


@dataclass(frozen=True)
class Config:
    """One way to drive in a bank."""

    agents: int = 1
    """Controlled agents of a world; 1 is the ego alone. The bank must have as many."""
    traffic: str = "log"
    """The others: "log" replays them, with "idm" vehicles react along their logged way, with "constant" everybody keeps
    his first velocity."""
    driver: str = "policy"
    """Driver of the agents: the "policy", or a baseline that ignores actions: "log", "idm", "constant" (speed)."""
    expert: str = "log"
    """Whom algorithms imitate that do: the driver of the "log" (in generated scenarios that of the traffic), or "idm",
    the Intelligent Driver Model along the route, which has an answer off the log, too."""
    control: str = "vehicles"
    """Whom scenarios offer to be controlled: "vehicles", or "all" that move, cyclists and pedestrians too."""
    dynamics: str = "bicycle"
    """Model of motion: "bicycle", "steering", "delta" or "jerk"; see `dynamics`."""
    actions: str = "discrete"
    """"discrete": an index for each number of a command; "joint": one for all; "continuous": all within [-1, 1]."""
    terminations: tuple[str, ...] = EVENTS
    """The events that end an episode."""
    goal: str = "remove"
    """Fate of an agent that reaches its goal: "remove", "stop" (it stands there) or "respawn" (it begins anew); see
    `goals`."""
    crash: str = "remove"
    """Fate of an agent that ends by another event: "remove" or "stop"."""
    conditioning: bool = False
    """Each driver of an episode draws weights of its own, which it sees; see `conditioning`."""
    weights: Weights = field(default_factory=Weights)
    neighbours: int = 8
    """Number of the nearest others that an agent sees."""
    waypoints: int = 10
    """Points of the route ahead that it sees."""
    road_points: int = 0
    """Pieces of road around it that it sees: lanes, lines, edges and signs; see `roadmap`. 0: none; 200 reach some 60
    m."""
    observation_noise: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Standard deviations of the others' positions (m), headings (rad) and velocities (m/s) as it sees them."""
    observation_mask: float = 0.0
    """The chance that it misses one of the others, or a piece of road, in a step."""
    view_range: float | None = None
    """Metres from it beyond which it sees neither others nor pieces of road; None: any."""
    view_angle: float = 2.0 * np.pi
    """Radians of its field of view for these, around straight ahead."""
    view_occlusion: bool = False
    """Boxes hide whose middle is behind them. All five change what is seen, and nothing else: see `perception`."""


def sight_of(config: Config) -> Sight:
    """Limits of sight of a configuration."""
    reach = np.inf if config.view_range is None else config.view_range
    return Sight(config.observation_noise, config.observation_mask, reach, config.view_angle, config.view_occlusion)


def check_settings(config: Config) -> None:
    """Raises ValueError, `name is value: remedy`, where a setting is none, whatever the bank."""
    if config.agents < 1:
        raise ValueError(f"agents is {config.agents}; it must be at least 1")
    for name, value, known in (
        ("traffic", config.traffic, TRAFFICS),
        ("driver", config.driver, DRIVERS),
        ("expert", config.expert, EXPERTS),
        ("actions", config.actions, ACTIONS),
        ("control", config.control, CONTROLS),
        ("dynamics", config.dynamics, DYNAMICS),
        ("goal", config.goal, GOALS),
        ("crash", config.crash, CRASHES),
        *(("terminations", value, EVENTS) for value in config.terminations),
    ):
        if value not in known:
            raise ValueError(f"{name} is {value!r}: choose from {', '.join(known)}")
    if config.neighbours < 1:
        raise ValueError(f"neighbours is {config.neighbours}; it must be at least 1")
    if config.waypoints < 1:
        raise ValueError(f"waypoints is {config.waypoints}; it must be at least 1")
    if config.waypoints > MAX_WAYPOINTS:
        raise ValueError(f"waypoints is {config.waypoints}; it must be at most {MAX_WAYPOINTS}")
    if not 0 <= config.road_points <= CANDIDATES:
        raise ValueError(f"road_points is {config.road_points}; it must be 0 .. {CANDIDATES}")
    check_sight(sight_of(config))
