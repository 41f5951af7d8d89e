"""Errors that a user can fix."""

from __future__ import annotations


class RunError(ValueError):
    """A run that cannot be created, found or resumed; the message is one line."""
