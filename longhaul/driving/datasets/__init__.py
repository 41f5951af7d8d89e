"""Driving logs: readers from each published format to one `Log`, with NumPy and nothing of JAX."""
