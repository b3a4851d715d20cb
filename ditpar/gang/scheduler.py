"""The caller's copy of the ranks' scheduler: a real one, which may be read, changed and replaced."""

from __future__ import annotations

from typing import Any

from ditpar.gang.wire import dumps


class SchedulerCopy:
    """The copy, and what is known about how it differs from the original.

    Attributes:
        sent: its pickle when it last equalled that of the ranks.
        outdated: whether the ranks' has gone on since.
    """

    def __init__(self, scheduler: Any) -> None:
        self.object = scheduler
        self.sent = b""
        self.outdated = False

    def changed(self) -> bytes | None:
        """Its pickle, if the caller has changed or replaced it."""
        data = dumps(self.object)
        return data if data != self.sent else None

    def remember(self) -> None:
        self.sent, self.outdated = dumps(self.object), False
