"""Driving: scenarios, a simulator on the device, and a procedural generator."""
