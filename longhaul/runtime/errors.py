"""Errors that a user can mend."""

from __future__ import annotations


class RunError(ValueError):
    """A run that can't be made, found or gone on with; the message is one line."""
