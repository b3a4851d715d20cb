"""Transformer calls that wait: so that both branches of guidance run side by side, and the steps of a stage pipeline overlap.

A call returns a Deferred. The calls of one step run when the next step's call comes whose input depends on them, or when
something needs their values. Under PipeFusion (arXiv 2405.14430) they then go through the stages band by band; each band
of the next step's input goes back to the first stage as soon as the last one has it, while later bands are still on
their way. So the steps overlap, and the pipeline drains only where the stock code needs a whole value.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ditpar.dataflow.deferred import Captured, Deferred, NotReady, resolve
from ditpar.dataflow.flow import Flow
from ditpar.dataflow.node import version
from ditpar.errors import PlanError
from ditpar.family import Family
from ditpar.mesh import Mesh
from ditpar.methods.root import Arguments, Root, output_shape
from ditpar.methods.stages import METHOD as PIPE
from ditpar.methods.stages import Slot, Stage
from ditpar.stage import cut
from ditpar.stage.link import Link
from ditpar.stage.program import Act, Edge, Kind, Round, Span, Unit, ops, units

METHOD = "cfg"
BACK = "pipe_back"
MAX_SLOTS = 8
"""Branches whose state is kept: more only come from pipelines that make new embeddings at each step."""


@dataclass
class Call:
    """One transformer call.

    Attributes:
        hidden: its latents, perhaps deferred.
        units: what goes through the stages.
        text: text tokens that go with a lead unit.
        fed: rows of `hidden` that come around the ring.
        grad: whether gradients were recorded where it was made; stock loops end before their last call runs.
        once: what its units share.
    """

    captured: Captured
    hidden: Tensor
    root: Root
    stage: Stage | None
    slot: Slot
    units: tuple[Unit, ...]
    text: int
    rows: int
    dim: int
    result: Deferred = field(init=False)
    fed: tuple[Span, ...] = ()
    grad: bool = field(default_factory=torch.is_grad_enabled)
    once: dict[str, Any] = field(default_factory=dict)
    buffer: Tensor | None = None

    def run(self, unit: Unit) -> Tensor:
        """The unit's rows of the result, on the last stage."""
        arguments = {**self.captured.get(), "hidden_states": self._input(unit)}
        if self.stage is not None:
            self.stage.carry(unit, self.text, self.rows, self.slot, self.once)
        return self.root(arguments)

    def whole(self) -> None:
        """Makes it go through the stages as a whole after all."""
        self.units = units(self.units[0].run, self.units[0].tick, Kind.SYNC, [], self.rows)

    def _input(self, unit: Unit) -> Tensor:
        if not isinstance(self.hidden, Deferred):
            return self.hidden
        if self.stage is not None and not self.stage.first:  # only its shape matters here
            hidden = self.hidden
            return torch.zeros((), dtype=hidden.dtype, device=hidden.device).expand(hidden.shape)
        lo, hi = unit.rows
        part = self.hidden.band(lo, hi)
        if unit.rows.size == self.rows:
            return part
        if self.buffer is None:
            self.buffer = part.new_zeros(self.hidden.shape)
        self.buffer.narrow(self.dim, lo, hi - lo).copy_(part)
        return self.buffer


class Calls:
    """The calls of one pipeline, whichever of its transformers they go to.

    Attributes:
        pairs: times that two calls ran side by side.
        alone: calls that every cfg rank ran by itself, since there was no second one.
        synchronous, patched: calls that went through the stages as a whole, and in bands.
        flow: the deferred values of the running request.
    """

    def __init__(self, family: Family, mesh: Mesh) -> None:
        self.family, self.mesh = family, mesh
        self.cfg = mesh.cfg if family.cfg.style == "separate" else None
        self.pairs = self.alone = self.synchronous = self.patched = 0
        pipe = mesh.pipe
        self.first, self.last = pipe.index == 0, pipe.index == pipe.size - 1
        self.back = Link(mesh.back, 0 if self.last else pipe.size - 1, BACK) if pipe.size > 1 else None
        self.forced: Mapping[tuple[str, str], int] = {}
        self._reset()

    @contextmanager
    def request(self) -> Iterator[None]:
        """The time of one request: nothing of it is left afterwards."""
        self._reset()
        try:
            yield
        finally:
            self._end()
            self.forced = self.flow.forced
            self._reset()

    def _reset(self) -> None:
        many = self.mesh.pipe.size > 1
        self.flow = Flow(self.run, owner=self.last, share=self._share if many else None, lazy=many)
        self.waiting: list[Call] = []
        self._slots: dict[Any, Slot] = {}
        self._input: tuple[Any, int | None] | None = None
        self._tick = self._made = 0
        self._ticked: set[Slot] = set()
        self._bands: list[Span] = []
        self._stages: list[Stage] = []
        self._coming: deque[tuple[Call, Span]] = deque()
        self._announced: Stage | None = None

    def defer(self, name: str, transformer: nn.Module, stage: Stage | None, root: Root) -> Root:
        """Calls return a Deferred and wait."""
        if stage is not None:
            self._stages.append(stage)

        def wrapped(arguments: Arguments) -> Tensor:
            given: Tensor = arguments["hidden_states"]
            rest = resolve({k: v for k, v in arguments.items() if k != "hidden_states"})
            hidden = given
            if isinstance(given, Deferred):  # which may stand for something else later on
                comes = self.flow.waits(given) or (self.waiting and _same(self.waiting[0].hidden, given))
                if given.pending and (comes or self.back is None):
                    hidden = Deferred(given._node)
                else:  # nothing brings its rows to the first stage
                    hidden = given.value()
            call = self._call(name, transformer, stage, root, given, hidden, rest)
            if self.flow.waits(hidden):
                call.fed = tuple(unit.rows for unit in call.units)
                self.run(call)
            like = torch.empty(
                output_shape(self.family, transformer, {**rest, "hidden_states": hidden}),
                dtype=hidden.dtype,
                device="meta",
            )
            call.result = self.flow.call(like, hidden.device, call.dim)
            self.waiting.append(call)
            return call.result

        return wrapped

    def _call(
        self,
        name: str,
        transformer: nn.Module,
        stage: Stage | None,
        root: Root,
        given: Tensor,
        hidden: Tensor,
        rest: dict[str, Any],
    ) -> Call:
        if stage is not None:
            stage.check(rest.get("skip_layers") or ())
        dim = self.family.embed.dim
        rows = hidden.shape[dim]
        source = (given._node, None) if isinstance(given, Deferred) else (given, version(given))
        again = self._input is not None and source[0] is self._input[0] and source[1] == self._input[1]
        slot, cold = self._slot(name, hidden, rest)
        if not again:
            self._input = source
            if slot in self._ticked:  # else it is another call of the same step
                self._tick += 1
                self._ticked.clear()
        self._ticked.add(slot)
        plan = self.mesh.plan
        kind = Kind.SYNC if stage is None or cold or self._tick < plan.warmup else Kind.PATCH
        text = rest["encoder_hidden_states"].shape[1] if self.family.joint else 0
        if stage is not None and not (again and self._bands and self._bands[-1].hi == rows):
            self._bands = self._cut(stage, hidden, rows, text)
        self._made += 1
        parts = units(self._made, self._tick, kind, self._bands, rows)
        return Call(Captured(rest), hidden, root, stage, slot, parts, text, rows, dim)

    def _cut(self, stage: Stage, hidden: Tensor, rows: int, text: int) -> list[Span]:
        """Bands of the latents' rows, such that all units have as many queries."""
        plan, grain = self.mesh.plan, stage.grain
        lead = 0.0
        if self.family.output == "tokens":
            grain = self.mesh.sequence.size
            lead = text
        elif text:  # in rows of the latents, of which `grain` make a row of tokens
            lead = text * stage.grain**2 / hidden.shape[-1]
        grains = -(-rows // grain)
        if plan.patches > grains:
            raise PlanError(
                f"plan: patches={plan.patches}: the latents have {rows} rows, in steps of {grain}; "
                f"use patches={grains} at most, or a larger size"
            )
        bands = cut.bands(rows, plan.patches or min(plan.pipe, grains), grain, lead)
        if self.family.output == "tokens" and bands[-1].size < grain:  # the last one takes what is over
            raise PlanError(
                f"plan: patches={len(bands)} leaves {bands[-1].size} tokens for the last band, too few for {grain} ring x "
                f"ulysses ranks; use fewer patches or a larger size"
            )
        return bands

    def _slot(self, name: str, hidden: Tensor, rest: dict[str, Any]) -> tuple[Slot, bool]:
        """The state of the call's branch, and whether it is new.

        Branches are told apart by their text, which stock pipelines prepare once; another batch or size is another one.
        """
        given = {k: v for k, v in rest.items() if k.startswith("encoder_") or k == "pooled_projections"}
        texts = [v for v in given.values() if isinstance(v, Tensor)]
        plain = tuple((k, repr(v)) for k, v in sorted(rest.items()) if not isinstance(v, Tensor | dict))
        key = (name, tuple(hidden.shape), tuple((id(t), version(t), t.shape) for t in texts), plain)
        slot = self._slots.pop(key, None)
        cold = slot is None
        self._slots[key] = slot = slot or Slot(texts)
        while len(self._slots) > MAX_SLOTS:
            del self._slots[next(iter(self._slots))]
        return slot, cold

    def _share(self, value: Tensor | None, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The last stage's tensor on all stages."""
        whole = torch.empty(shape, dtype=dtype, device=device) if value is None else value.contiguous()
        return self.mesh.pipe.broadcast(PIPE, whole, self.mesh.pipe.size - 1)

    # -- running -------------------------------------------------------------------------------------------------------

    def run(self, following: Call | None = None) -> None:
        """Runs all waiting calls; `following` is the call whose input they lead to, if it is there already."""
        waiting, self.waiting = self.waiting, []
        if not waiting:
            return
        mine, others = self._shared_out(waiting)
        kinds = [call.units[0].kind for call in waiting]
        self.synchronous += kinds.count(Kind.SYNC)
        self.patched += kinds.count(Kind.PATCH)
        this = Round(tuple(call.units for call in mine), waiting[0].fed, following.fed if following else ())
        self.mesh.health.broken = self.mesh.pipe.size > 1  # until the round has ended
        with torch.set_grad_enabled(waiting[0].grad):
            self._do(this, waiting[0], mine, others, following)
        self.mesh.health.broken = False

    def _do(
        self, this: Round, first: Call, mine: list[Call], others: list[Call | None], following: Call | None
    ) -> None:
        by_run = {call.units[0].run: i for i, call in enumerate(mine)}
        order = [(call, unit) for call in mine for unit in call.units]
        owed = deque[Span]()
        if following is not None:
            # Of a pair, only one call was made yet, and it may still have to go as a whole.
            if self.cfg is None or self.cfg.size == 1:
                order.append((following, following.units[0]))
            if self.first and self.back is not None:
                self._coming.extend((following, rows) for rows in following.fed)
                self._post()
        upcoming = iter(zip(order, [*order[1:], None], strict=True))
        self._announced = None
        for op in ops(self.mesh.pipe.index, self.mesh.pipe.size, this):
            if op.act is Act.RUN:
                assert op.unit is not None
                i = by_run[op.unit.run]
                _announce(*next(upcoming))
                self._run_unit(mine[i], others[i], op.unit)
            elif op.edge is Edge.RING and op.rows is not None:
                if op.act is Act.RECV:
                    self._receive(first, op.rows)
                else:
                    owed.append(op.rows)
            if following is not None:
                self._send(following, owed)
        if owed:
            raise AssertionError(f"rows {owed} of the next step's input cannot be computed from this step's")
        stage = mine[-1].stage
        if following is not None and stage is not None and stage.next is not None:
            self._announced = stage
        self.flow.ran()

    def _shared_out(self, waiting: list[Call]) -> tuple[list[Call], list[Call | None]]:
        """This rank's calls, and for each the call that its partner runs meanwhile."""
        if self.cfg is None or self.cfg.size == 1:
            return waiting, [None] * len(waiting)
        pairs = [waiting[i : i + 2] for i in range(0, len(waiting), 2)]
        self.pairs += len(waiting) // 2
        self.alone += len(waiting) % 2
        everyone = frozenset(range(self.cfg.size))
        for pair in pairs:
            for i, call in enumerate(pair):
                runners = frozenset({i}) if len(pair) == 2 else everyone
                if call.stage is not None and not runners <= call.slot.held:  # some have no state of this branch
                    call.whole()
                call.slot.held = runners
        index = self.cfg.index
        mine = [pair[index] if len(pair) == 2 else pair[0] for pair in pairs]
        return mine, [pair[1 - index] if len(pair) == 2 else None for pair in pairs]

    def _run_unit(self, call: Call, other: Call | None, unit: Unit) -> None:
        out = call.run(unit)
        if not self.last:
            return
        call.result.fill(*unit.rows, out)
        if other is None:
            return
        if [u.rows for u in other.units] == [u.rows for u in call.units]:
            self._swap(out, other, unit.rows)
        elif unit is call.units[-1]:  # one branch was cold and went as a whole
            self._swap(call.result.band(0, call.rows), other, Span(0, call.rows))

    def _swap(self, mine: Tensor, other: Call, rows: Span) -> None:
        """Exchanges rows of two branches between the ranks that run them."""
        assert self.cfg is not None
        value = mine.contiguous()
        received = _rows_of(other.result, other.dim, rows)
        self.cfg.exchange(METHOD, [value, value], [received, received])
        other.result.fill(*rows, received)

    def _post(self) -> None:
        """Keeps buffers posted for the next two messages around the ring, also across rounds."""
        while self._coming and self.back is not None and self.back.posted < 2:
            call, rows = self._coming.popleft()
            self.back.post(_rows_of(call.hidden, call.dim, rows))

    def _receive(self, call: Call, rows: Span) -> None:
        """Takes rows of the call's input from the last stage."""
        assert self.back is not None and isinstance(call.hidden, Deferred)
        self._post()
        call.hidden.fill(*rows, self.back.take()[0])

    def _send(self, following: Call, owed: deque[Span]) -> None:
        """Sends the rows of the next step's input that can be computed by now."""
        while owed:
            try:
                part = following.hidden.band(*owed[0])  # type: ignore[attr-defined]
            except NotReady:  # they depend on rows further down
                return
            assert self.back is not None
            self.back.send(part)
            owed.popleft()

    def _end(self) -> None:
        """Takes off the ring what was sent for a call that never ran, so that the next request does not meet it.

        After a failure within a round nobody may be there to take what was sent, so nothing is waited for.
        """
        if self.mesh.health.broken:
            return
        for stage in self._stages:
            stage.finish(announced=stage is self._announced)
        if self.back is None:
            return
        call = self.waiting[0] if self.waiting else None
        if self.first and call is not None:
            for rows in call.fed:
                self.back.take(lambda rows=rows: [_rows_of(call.hidden, call.dim, rows)])  # type: ignore[misc]
        self.back.finish()


def _announce(this: tuple[Call, Unit], following: tuple[Call, Unit] | None) -> None:
    """Tells the stage what comes after a unit, if that has the same sizes and goes through the same stage."""
    call, stage = this[0], this[0].stage
    if stage is None:
        return
    stage.next = None
    if following is not None and following[0].stage is stage and following[0].hidden.shape == call.hidden.shape:
        stage.next = following[1], following[0].text


def _same(hidden: Tensor, given: Deferred) -> bool:
    return isinstance(hidden, Deferred) and hidden._node is given._node


def _rows_of(like: Tensor, dim: int, rows: Span) -> Tensor:
    """An empty tensor for some rows of another."""
    shape = [*like.shape[:dim], rows.size, *like.shape[dim + 1 :]]
    return torch.empty(shape, dtype=like.dtype, device=like.device)
