"""A run's policy behind HTTP: completions of language models, actions of the others, with weights that follow a run."""
