"""What a rank did when: computing units, sending, waiting for others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

What = Literal["compute", "send", "wait"]


@dataclass(frozen=True)
class Event:
    """A span of time on one rank.

    Attributes:
        what: computing, handing a message to a link, or waiting for one.
        name: of the unit or the link.
        begin, end: nanoseconds on the host's monotonic clock, which all ranks of a host share.
        facts: step, rows, bytes and the like.
    """

    what: What
    name: str
    begin: int
    end: int
    facts: dict[str, Any] = field(default_factory=dict)


class Trace:
    """The events of one rank. Waits inside a compute span are events of their own, and no compute time."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    @contextmanager
    def span(self, what: What, name: str, **facts: Any) -> Iterator[None]:
        begin = time.monotonic_ns()
        try:
            yield
        finally:
            self.events.append(Event(what, name, begin, time.monotonic_ns(), facts))
