"""Growth of results with a model's size and its data: the grid of runs, the law through them, the page."""
