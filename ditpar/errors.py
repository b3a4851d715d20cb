"""The errors that ditpar raises on purpose. Each names the argument and says what would work."""

from __future__ import annotations


class DitparError(Exception):
    """Base of all errors that ditpar raises on purpose."""


class PlanError(DitparError, ValueError):
    """A plan that cannot be right for this model, request or number of ranks."""


class RequestError(DitparError, ValueError):
    """A request with a value out of its limits."""


class ModelError(DitparError, ValueError):
    """A model folder or class that cannot be used (missing, truncated, pickled, unknown)."""


class StaleError(DitparError, RuntimeError):
    """A tensor that a deferred call had captured was changed before the call ran."""


class GangError(DitparError, RuntimeError):
    """A rank raised, died or stopped answering. The whole gang has been ended.

    Attributes:
        rank: the rank at fault, or None when no single rank is.
        remote_traceback: that rank's traceback as text, or its last stacks; may be empty.
    """

    def __init__(self, message: str, rank: int | None = None, remote_traceback: str = "") -> None:
        super().__init__(f"{message}\n{remote_traceback}" if remote_traceback else message)
        self.rank = rank
        self.remote_traceback = remote_traceback
