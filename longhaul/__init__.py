"""Longhaul: reinforcement learning for billions of environment steps, end to end on the device.

Importing the package imports neither JAX's backends nor any optional dependency; import what you use:
`from longhaul.algorithms import ppo`, `from longhaul.topologies import fused`, `from longhaul.driving.sim import
simulator`.
"""

__version__ = "0.1.0"
