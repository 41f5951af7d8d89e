"""Algorithms: a loss, an update and a config each; written for one shard, ignorant of devices and environments."""
