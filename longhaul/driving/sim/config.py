"""How one drives in a bank: every setting of the simulator, and what is none."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from longhaul.driving.scenario import compile
from longhaul.driving.scenario.lane_graph import CANDIDATES
from longhaul.driving.sim import goal_behaviour
from longhaul.driving.sim.actions import ACTIONS
from longhaul.driving.sim.dynamics import MODELS
from longhaul.driving.sim.observation import MAX_WAYPOINTS
from longhaul.driving.sim.perception import Sight, check_sight
from longhaul.driving.sim.reward import EVENTS, Weights

TRAFFICS = ("log", "idm", "constant")
DRIVERS = ("policy", "log", "idm", "constant")
EXPERTS = ("log", "idm")
DYNAMICS = tuple(MODELS)
CONTROLS = tuple(compile.CONTROLS)
GOALS, CRASHES = goal_behaviour.GOALS, goal_behaviour.CRASHES


@dataclass(frozen=True)
class Config:
    """One way to drive in a bank."""

    agents: int = 1
    """Controlled agents of a world; 1 is the ego alone. The bank must have as many."""
    traffic: str = "log"
    """The others: "log" replays them, with "idm" vehicles react along their logged way, with "constant" everybody keeps
    his first velocity."""
    driver: str = "policy"
    """Who drives the agents: the "policy", or a baseline that ignores actions: "log", "idm", "constant" (speed)."""
    expert: str = "log"
    """Whom algorithms imitate that do: the driver of the "log" (in generated scenarios that of the traffic), or "idm",
    the Intelligent Driver Model along the route, which has an answer off the log, too."""
    control: str = "vehicles"
    """Whom scenarios offer to be controlled: "vehicles", or "all" that move, cyclists and pedestrians too."""
    dynamics: str = "bicycle"
    """How agents move: "bicycle", "steering", "delta" or "jerk"; see `dynamics`."""
    actions: str = "discrete"
    """"discrete": an index for each number of a command; "joint": one for all; "continuous": all within [-1, 1]."""
    terminations: tuple[str, ...] = EVENTS
    """The events that end an episode."""
    goal: str = "remove"
    """Who reaches its goal: "remove", "stop" (it stands there) or "respawn" (it begins anew); see `goals`."""
    crash: str = "remove"
    """Who ends by another event: "remove" or "stop"."""
    conditioning: bool = False
    """Each driver of an episode draws weights of its own, which it sees; see `conditioning`."""
    weights: Weights = field(default_factory=Weights)
    neighbours: int = 8
    """How many of the nearest others an agent sees."""
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
    """How agents see."""
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
