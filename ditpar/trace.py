"""What a rank did when: computing units, sending, waiting for others. To and from files that trace viewers read."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from ditpar.errors import RequestError

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


@dataclass(frozen=True)
class Shares:
    """Shares of a span of time; they add up to 1.

    Attributes:
        busy: computing or sending, and not waiting meanwhile.
        waiting: for a message.
        idle: neither.
    """

    busy: float
    waiting: float
    idle: float


def shares(by_rank: Sequence[Sequence[Event]], window: tuple[int, int] | None = None) -> list[Shares]:
    """What each rank did in a window of time, in nanoseconds; by default from the first event of any rank to the last.

    Raises ValueError when the window is empty.
    """
    times = [t for events in by_rank for e in events for t in (e.begin, e.end)]
    lo, hi = window or (min(times, default=0), max(times, default=0))
    if lo >= hi:
        raise ValueError(f"nothing happens between {lo} and {hi}")
    found = []
    for events in by_rank:
        spans = [(max(e.begin, lo), min(e.end, hi), e.what == "wait") for e in events]
        waiting = _covered((a, b) for a, b, wait in spans if wait)
        taken = _covered((a, b) for a, b, _ in spans)
        found.append(Shares((taken - waiting) / (hi - lo), waiting / (hi - lo), 1 - taken / (hi - lo)))
    return found


def mean(of: Sequence[Shares]) -> Shares:
    """Of all ranks' time together."""
    busy, waiting, idle = (sum(getattr(s, name) for s in of) / len(of) for name in ("busy", "waiting", "idle"))
    return Shares(busy, waiting, idle)


def _covered(spans: Iterable[tuple[int, int]]) -> int:
    """How much of time some spans cover; what several cover counts once."""
    total, reached = 0, None
    for begin, end in sorted(spans):
        start = begin if reached is None else max(begin, reached)
        if end > start:
            total, reached = total + end - start, end
    return total


def chrome(by_rank: Sequence[Sequence[Event]]) -> dict[str, Any]:
    """The events as a JSON object in Chrome's trace event format, for Perfetto and chrome://tracing.

    Each rank is a process. Times are microseconds since the first event; `read` gives back what went in.
    """
    origin = min((e.begin for events in by_rank for e in events), default=0)
    entries: list[dict[str, Any]] = []
    for rank, events in enumerate(by_rank):
        entries.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}})
        entries.append({"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}})
        entries += [
            {
                "ph": "X",
                "cat": event.what,
                "name": event.name,
                "pid": rank,
                "tid": 0,
                "ts": (event.begin - origin) / 1e3,
                "dur": (event.end - event.begin) / 1e3,
                "args": event.facts,
            }
            for event in events
        ]
    return {"traceEvents": entries, "displayTimeUnit": "ms", "otherData": {"origin_ns": origin}}


def read(path: str | Path) -> list[list[Event]]:
    """The events of each rank in a file with what `chrome` made. Entries of other kinds are passed over.

    Raises RequestError when the file cannot be read or has no events of ranks.
    """
    try:
        given = json.loads(Path(path).read_bytes())
        origin = int(given["otherData"]["origin_ns"])
        entries = [(e["ph"], e) for e in given["traceEvents"] if e["ph"] in ("M", "X")]
        ranks: dict[int, list[Event]] = {e["pid"]: [] for _, e in entries}
        for phase, e in entries:
            if phase == "X" and e["cat"] in get_args(What):
                begin = origin + round(e["ts"] * 1e3)
                ranks[e["pid"]].append(
                    Event(e["cat"], str(e["name"]), begin, begin + round(e["dur"] * 1e3), dict(e["args"]))
                )
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror or error}") from None
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
        raise RequestError(f"{path}: not a trace of ditpar") from None
    if sorted(ranks, key=str) != sorted(range(len(ranks)), key=str) or not any(ranks.values()):
        raise RequestError(f"{path}: a trace without events of ranks")
    if any(e.end < e.begin for events in ranks.values() for e in events):
        raise RequestError(f"{path}: an event ends before it begins")
    return [ranks[rank] for rank in range(len(ranks))]
