"""Environments that ship with Longhaul: probes with known values, classic control, and the registry of names."""
