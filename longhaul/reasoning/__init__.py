"""Reasoning with verifiable rewards: language models, tasks with checkers, sampling."""
