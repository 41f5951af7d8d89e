"""Topologies: placement of environments and policies, and the data sent between them."""
