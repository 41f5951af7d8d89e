"""Topologies: where environments and policies run, and what travels between them."""
