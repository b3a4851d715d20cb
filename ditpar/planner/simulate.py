"""A stage pipeline in virtual time: the schedule that the ranks run (ditpar/stage/program.py), without the ranks.

Each stage has a clock and goes through its operations in order. Clocks count whole nanoseconds, so results are exact.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from ditpar.errors import DitparError
from ditpar.stage import program
from ditpar.stage.program import Act, Edge, Kind, Op, Round, Span, Unit
from ditpar.trace import Event, Shares, What, mean, shares

Seconds = Callable[[Unit, int], float]
"""Seconds of a unit on a stage."""


class ScheduleError(DitparError, RuntimeError):
    """A schedule that cannot be run: its stages wait for each other, or do not agree on what is sent."""


@dataclass(frozen=True)
class Wire:
    """What a message costs on the link that leaves a stage.

    Attributes:
        latency: seconds from the last byte leaving to its arrival.
        bandwidth: bytes a second; messages take it one after another.
        handover: seconds for which a send holds up its stage.
    """

    latency: float = 0.0
    bandwidth: float = inf
    handover: float = 0.0


@dataclass(frozen=True)
class Costs:
    """What the work of one pipeline costs.

    Attributes:
        seconds: of a unit on a stage; `by_queries` makes such a function.
        overhead: seconds that every stage computes at the beginning of each round, whatever it carries.
        wires: the links; one for all, or one a stage for the link that leaves it (the last stage's is the ring edge).
        chain_bytes: of the message that takes a unit to the next stage.
        ring_bytes: of the message that takes rows of the next round's input back to the first stage.
    """

    seconds: Seconds
    overhead: float = 0.0
    wires: Wire | Sequence[Wire] = Wire()
    chain_bytes: Callable[[Unit], float] = lambda unit: 0.0
    ring_bytes: Callable[[Span], float] = lambda rows: 0.0


@dataclass(frozen=True)
class Timeline:
    """What each stage does when.

    Attributes:
        by_stage: events of each stage, in order; times are nanoseconds since the request began.
        end: when the last stage to end does so, in nanoseconds.
        steady: the steady state: from the moment that the last stage begins its first patched unit (all stages have
            work from then on) to the one at which the first stage ends its last (no stage ran out of work before).
            None when the pipeline drains before it is full.
    """

    by_stage: list[list[Event]]
    end: int
    steady: tuple[int, int] | None

    @property
    def seconds(self) -> float:
        return self.end / 1e9

    def shares(self, steady: bool = False) -> list[Shares]:
        """Of each stage's time, overall or in the steady state. Raises ValueError when there is no steady state."""
        if steady and self.steady is None:
            raise ValueError("there is no steady state: the pipeline drains before it is full")
        return shares(self.by_stage, self.steady if steady else (0, self.end))

    def mean(self, steady: bool = False) -> Shares:
        """Of all stages' time."""
        return mean(self.shares(steady))


def by_queries(each: float, tokens: float = 1.0, text: float = 0.0) -> Seconds:
    """Seconds proportional to query tokens: `each` a token, `tokens` a row; `text` more go with the lead unit of a run."""
    return lambda unit, stage: each * (unit.rows.size * tokens + (text if unit.lead else 0.0))


def rounds(steps: int, bands: Sequence[Span], *, warmup: int = 1, calls: int = 1, cfg: int = 1) -> list[list[Round]]:
    """The rounds of a whole request, for each cfg rank: those that Calls makes for a stock denoising loop.

    Args:
        bands: of the latents' rows, in order.
        warmup: steps that run synchronously; the first always does, as there is no state before it.
        calls: model calls a step; 2 when both branches of guidance have their own.
        cfg: ranks that calls are shared out to in pairs, 1 or 2; a call without a partner is made by both.
    """
    if cfg not in (1, 2):
        raise ValueError(f"cfg={cfg}: calls are shared out to 1 or 2 ranks")
    rows = bands[-1].hi
    made = []
    for tick in range(steps):
        kind = Kind.SYNC if tick < max(warmup, 1) else Kind.PATCH
        made.append([program.units(tick * calls + i, tick, kind, bands, rows) for i in range(calls)])
    fed = [(), *(tuple(unit.rows for unit in runs[0]) for runs in made[1:]), ()]
    return [
        [Round(tuple(_shared_out(runs, rank, cfg)), fed[i], fed[i + 1]) for i, runs in enumerate(made)]
        for rank in range(cfg)
    ]


def _shared_out(runs: Sequence[tuple[Unit, ...]], rank: int, cfg: int) -> list[tuple[Unit, ...]]:
    pairs = [runs[i : i + cfg] for i in range(0, len(runs), cfg)]
    return [pair[rank] if len(pair) == cfg else pair[0] for pair in pairs]


def simulate(request: Sequence[Round], stages: int, costs: Costs) -> Timeline:
    """Runs the rounds of one cfg rank's pipeline; a stage begins the next round right after the one before.

    Raises:
        ScheduleError: no stage can go on, a stage receives something else than it expects, or a message is left over.
    """
    wires = [costs.wires] * stages if isinstance(costs.wires, Wire) else list(costs.wires)
    if len(wires) != stages:
        raise ValueError(f"wires: {len(wires)} links for {stages} stages; give one for each")
    links = [_Link(wire) for wire in wires]
    running = [_Stage(i, stages, request, costs, links) for i in range(stages)]
    while any(stage.op is not None for stage in running):
        if not any(stage.advance() for stage in running):
            waits = "; ".join(f"stage {stage.index} {stage.state}" for stage in running)
            raise ScheduleError(f"no stage can go on: {waits}")
    for stage, link in enumerate(links):
        if link.messages:
            what = _name(link.messages[0][0])
            raise ScheduleError(f"stage {stage} sent {what}, which stage {(stage + 1) % stages} never takes")
    events = [stage.events for stage in running]
    return Timeline(events, max(stage.clock for stage in running), _steady(events))


def _steady(by_stage: Sequence[Sequence[Event]]) -> tuple[int, int] | None:
    patched = [[e for e in events if e.facts.get("kind") == Kind.PATCH.value] for events in (by_stage[-1], by_stage[0])]
    if not all(patched) or patched[0][0].begin >= patched[1][-1].end:
        return None
    return patched[0][0].begin, patched[1][-1].end


class _Link:
    """One direction between two stages."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.free = 0
        self.messages: deque[tuple[Op, int]] = deque()
        """What was sent and not yet taken, and when it arrives."""

    def send(self, op: Op, sent: int, size: float) -> None:
        self.free = max(sent, self.free) + _ns(size / self.wire.bandwidth)
        self.messages.append((op, self.free + _ns(self.wire.latency)))


class _Stage:
    """One stage on its way through its operations.

    Attributes:
        op: what it does next; None at the end.
        clock: how far it has come.
    """

    def __init__(self, index: int, stages: int, request: Sequence[Round], costs: Costs, links: list[_Link]) -> None:
        self.index, self.costs = index, costs
        self.before, self.after = links[index - 1], links[index]
        self.clock, self.round = 0, -1
        self.events: list[Event] = []
        self._todo = self._ops(stages, request)
        self.op = next(self._todo, None)

    def _ops(self, stages: int, request: Sequence[Round]) -> Iterator[Op]:
        for self.round, this in enumerate(request):
            self._spend("compute", "overhead", _ns(self.costs.overhead))
            yield from program.ops(self.index, stages, this)

    @property
    def state(self) -> str:
        return "is done" if self.op is None else f"waits for {_name(self.op)} in round {self.round}"

    def advance(self) -> bool:
        """Goes on until it has to wait for what was not sent yet. Returns whether it came any further."""
        begun = self.op
        while self.op is not None and (self.op.act is not Act.RECV or self.before.messages):
            self._do(self.op)
            self.op = next(self._todo, None)
        return self.op is not begun

    def _do(self, op: Op) -> None:
        if op.act is Act.RUN:
            assert op.unit is not None
            unit = op.unit
            facts = {"step": unit.tick, "run": unit.run, "part": unit.part, "rows": list(unit.rows)}
            seconds = self.costs.seconds(unit, self.index)
            self._spend("compute", _name(op), _ns(seconds), **facts, kind=unit.kind.value)
        elif op.act is Act.SEND:
            size = self._bytes(op)
            self._spend("send", _name(op), _ns(self.after.wire.handover), bytes=size)
            self.after.send(op, self.clock, size)
        else:
            sent, arrival = self.before.messages.popleft()
            if sent._replace(act=Act.RECV) != op:
                raise ScheduleError(
                    f"stage {self.index} in round {self.round} waits for {_name(op)}, but {_name(sent)} comes"
                )
            self._spend("wait", _name(op), arrival - self.clock)

    def _bytes(self, op: Op) -> float:
        if op.edge is Edge.CHAIN:
            assert op.unit is not None
            return self.costs.chain_bytes(op.unit)
        assert op.rows is not None
        return self.costs.ring_bytes(op.rows)

    def _spend(self, what: What, name: str, duration: int, **facts: object) -> None:
        if duration > 0 or "kind" in facts:
            begin, self.clock = self.clock, self.clock + duration
            self.events.append(Event(what, name, begin, self.clock, {"round": self.round, **facts}))


def _ns(seconds: float) -> int:
    if not 0 <= seconds < inf:
        raise ValueError(f"{seconds} seconds: a cost must be finite and not negative")
    return round(seconds * 1e9)


def _name(op: Op) -> str:
    if op.unit is not None:
        unit = op.unit
        name = f"unit {unit.part} of call {unit.run} (rows {unit.rows.lo} to {unit.rows.hi})"
        return f"{name} of the chain" if op.edge is Edge.RING else name
    assert op.rows is not None
    return f"rows {op.rows.lo} to {op.rows.hi} around the ring"
