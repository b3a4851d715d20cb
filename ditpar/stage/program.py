"""The schedule of a stage pipeline: which units run on which stage in which order, and what is passed between stages.

One generator is the schedule for both the ranks and the simulator (ditpar/planner/simulate.py).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Kind(enum.Enum):
    """How a unit uses the state of its run: SYNC replaces all rows, PATCH its own rows and reads the others as they are."""

    SYNC = "sync"
    PATCH = "patch"


class Span(NamedTuple):
    """Rows [lo, hi)."""

    lo: int
    hi: int

    @property
    def size(self) -> int:
        return self.hi - self.lo


@dataclass(frozen=True)
class Unit:
    """One pass of some rows through one stage.

    Attributes:
        run: number of the model call that it is part of, within the request.
        kind: how it uses the state.
        tick: step of the loop that the call belongs to.
        rows: the rows that it carries.
        part: its number among the units of its run.
        lead: whether it carries what goes along once a run (the text of joint models).
    """

    run: int
    kind: Kind
    tick: int
    rows: Span
    part: int = 0
    lead: bool = True


class Edge(enum.Enum):
    """A link: to the next stage, or from the last stage back to the first."""

    CHAIN = "chain"
    RING = "ring"


class Act(enum.Enum):
    RECV = "recv"
    RUN = "run"
    SEND = "send"


class Op(NamedTuple):
    """Something that a stage does.

    RECV and SEND along the chain carry what the unit's blocks work on; around the ring they carry `rows` of the next
    round's input. A RECV says what the next RUN needs, so it may be posted early.
    """

    act: Act
    unit: Unit | None = None
    edge: Edge | None = None
    rows: Span | None = None


@dataclass(frozen=True)
class Round:
    """Model calls that run together: those of one step of the loop.

    Attributes:
        runs: the units of each call, in order; all units of a call go through before the next call's.
        inflow: rows of the input that come around the ring, in order; none when the first stage has it already.
        outflow: rows of the next round's input that go around the ring.
    """

    runs: tuple[tuple[Unit, ...], ...]
    inflow: tuple[Span, ...] = ()
    outflow: tuple[Span, ...] = ()


def ops(stage: int, stages: int, this: Round) -> Iterator[Op]:
    """What one stage does in a round.

    Rows of the next round's input go around the ring as soon as the last call has done them; so the first stage can
    begin the next round while later stages still work on this one.
    """
    first, last = stage == 0, stage == stages - 1
    arriving = list(this.inflow) if first and stages > 1 else []
    leaving = list(this.outflow) if last and stages > 1 else []
    for i, run in enumerate(this.runs):
        for unit in run:
            if not first:
                yield Op(Act.RECV, unit, Edge.CHAIN)
            while arriving and arriving[0].lo < unit.rows.hi:
                yield Op(Act.RECV, edge=Edge.RING, rows=arriving.pop(0))
            yield Op(Act.RUN, unit)
            if not last:
                yield Op(Act.SEND, unit, Edge.CHAIN)
            while leaving and i == len(this.runs) - 1 and leaving[0].hi <= unit.rows.hi:
                yield Op(Act.SEND, edge=Edge.RING, rows=leaving.pop(0))
    for rows in leaving:
        yield Op(Act.SEND, edge=Edge.RING, rows=rows)
    for rows in arriving:
        yield Op(Act.RECV, edge=Edge.RING, rows=rows)


def units(run: int, tick: int, kind: Kind, bands: Sequence[Span], rows: int) -> tuple[Unit, ...]:
    """The units of one call: one over all rows when it is SYNC, else one a band."""
    spans = [Span(0, rows)] if kind is Kind.SYNC else bands
    return tuple(Unit(run, kind, tick, span, part, part == 0) for part, span in enumerate(spans))
