"""The stages of one transformer: which blocks this rank runs, and what it takes from and hands to its neighbours.

Every rank keeps the model's own forward. Blocks of other stages pass their streams through; the first own block takes
the streams from the stage before, and what comes after the last own block hands them on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor, nn

from ditpar.errors import PlanError
from ditpar.family import Family
from ditpar.mesh import Mesh
from ditpar.stage import cut
from ditpar.stage.link import Link
from ditpar.stage.program import Span, Unit
from ditpar.stage.state import StaleKV

METHOD = "pipe"
_TOKENS, _TEXT = 4096, 512
"""For which costs are estimated when a model is cut: a picture of 1024 x 1024 with a long prompt."""


class Slot:
    """What is kept for one branch of guidance of one transformer in one request."""

    def __init__(self, holds: list[Any]) -> None:
        self.kv = StaleKV()
        self.once: dict[str, Any] = {}
        self.held: frozenset[int] = frozenset()
        """The cfg ranks that ran the branch the last time: others have no state of it, or an old one."""
        self.holds = holds
        """Tensors whose identity tells branches apart; held, so that no other object takes their place."""


class Stage:
    """This rank's stage of one transformer.

    Attributes:
        begin, end: own blocks, numbered through all block lists.
        ending: those of the last stage.
        grain: rows of the latents that are never cut apart.
        unit, text: what the running forward carries, and how many text tokens a lead unit does.
        rows: how many rows there are in all.
        next: the unit after it and its text tokens, if they are known; perhaps of another call, of the same size.
        compiled: whether own blocks are.
        slot, once: the state of its branch, and what this call has computed already.
    """

    unit: Unit
    text: int
    rows: int
    slot: Slot
    next: tuple[Unit, int] | None = None
    compiled = False

    def __init__(self, family: Family, mesh: Mesh, transformer: nn.Module) -> None:
        self.family, self.index, self.count = family, mesh.pipe.index, mesh.pipe.size
        sizes = block_split(family, transformer, mesh.plan.pipe, mesh.plan.split)
        self.begin, self.end = sum(sizes[: self.index]), sum(sizes[: self.index + 1])
        self.ending = range(sum(sizes[:-1]), sum(sizes))
        self.before = Link(mesh.pipe, self.index - 1, METHOD) if not self.first else None
        self.after = Link(mesh.pipe, self.index + 1, METHOD) if not self.last else None
        self.grain = 1
        if family.output == "latent":  # rows of the latents that make one row of tokens
            size: Any = transformer.config["patch_size"]  # type: ignore[index]
            self.grain = size if isinstance(size, int) else size[0]
        self.once: dict[str, Any] = {}
        self._entered = self._left = False
        self._announced: list[Tensor] = []

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.count - 1

    def check(self, skipped: Collection[int]) -> None:
        """Raises PlanError, on all ranks alike, when a call skips the whole last stage, which then takes nothing."""
        if set(self.ending) <= set(skipped):
            raise PlanError(
                f"skip_layers={list(skipped)} leaves out all blocks of the last stage ({self.ending.start} to "
                f"{self.ending.stop - 1}); use split= to give it another one"
            )

    def carry(self, unit: Unit, text: int, rows: int, slot: Slot, once: dict[str, Any]) -> None:
        """Begins a forward with these rows."""
        self.unit, self.text, self.rows, self.slot, self.once = unit, text, rows, slot, once
        self._entered = self._left = False

    def enter(
        self, kwargs: dict[str, Any], shares: Callable[[Unit, int], list[int]], vary: Callable[[Tensor, int], Tensor]
    ) -> None:
        """Before the first own block: takes the streams from the stage before."""
        if self._entered:
            return
        self._entered = True
        if self.before is None:
            return
        like = [kwargs[name] for name in self.family.streams]
        for coming in [(self.unit, self.text), self.next][self.before.posted :]:
            if coming is not None:
                rows = shares(*coming)
                self.before.post(*(x.new_empty((x.shape[0], n, x.shape[2])) for x, n in zip(like, rows, strict=True)))
        kwargs.update(zip(self.family.streams, (vary(x, 1) for x in self.before.take()), strict=True))

    def leave(self, kwargs: Mapping[str, Any], shares: Callable[[Unit, int], list[int]]) -> None:
        """After the last own block: hands the streams to the stage after."""
        if not self._left and self.after is not None:
            self._left = True
            streams = [kwargs[name] for name in self.family.streams]
            self.after.send(*streams)
            rows = shares(*self.next) if self.next else []
            self._announced = [
                x.new_zeros(()).expand(x.shape[0], n, x.shape[2]) for x, n in zip(streams, rows, strict=False)
            ]

    def finish(self, announced: bool) -> None:
        """Ends a request: waits until all that was sent has left.

        Args:
            announced: whether `next` never came. The stage after waits for it, so it gets zeros.
        """
        if announced and self.before is not None:
            self.before.take()
        if self.after is not None:
            if announced:
                self.after.send(*self._announced)
            self.after.finish()
        self._announced = []

    def left(self) -> None:
        """Makes sure that the streams were handed on."""
        if not self._left:
            raise PlanError("all blocks of the later stages were skipped; a stage pipeline cannot pass its result on")

    # -- what is computed once -----------------------------------------------------------------------------------------

    def memo(self, path: str, per_request: bool, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call of a module that all units of a call, or all calls of a branch, give the same arguments."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            memo = self.slot.once if per_request else self.once
            if path not in memo:
                memo[path] = call(*args, **kwargs)
            return memo[path]

        return wrapped

    def embed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The embedding of the unit's rows alone; other rows are zeros, which no block sees."""
        dim = self.family.embed.dim

        def wrapped(x: Tensor) -> Tensor:
            rows = x.shape[dim]
            lo, hi = self.unit.rows if self.first else Span(0, self.grain)
            if hi - lo == rows:
                return call(x)
            part: Tensor = call(x.narrow(dim, lo, hi - lo))
            each = (hi - lo) // part.shape[dim]
            shape = [*part.shape[:dim], rows // each, *part.shape[dim + 1 :]]
            if not self.first:
                return part.expand(shape)
            whole = part.new_zeros(shape)
            whole.narrow(dim, lo // each, part.shape[dim]).copy_(part)
            return whole

        return wrapped

    def once_modules(
        self, transformer: nn.Module, blocks: Mapping[str, nn.Module]
    ) -> list[tuple[str, nn.Module, bool]]:
        """The modules of the Family's `per_step` and `per_request`, as (path, module, per request).

        Those within compiled blocks are left out.
        """
        mine = list(blocks.items())[self.begin : self.end]
        self.compiled = any(block._compiled_call_impl is not None for _, block in mine)
        own = [path for path, block in mine if block._compiled_call_impl is None]
        found = []
        for patterns, per_request in ((self.family.per_step, False), (self.family.per_request, True)):
            for pattern in patterns:
                where, star, rest = pattern.partition(".*.")
                paths = [f"{path}.{rest}" for path in own if path.rpartition(".")[0] == where] if star else [pattern]
                for path in paths:
                    module = _at(transformer, path)
                    if module is not None:
                        found.append((path, module, per_request))
        return found


def _at(root: nn.Module, path: str) -> nn.Module | None:
    found: Any = root
    for name in path.split("."):
        found = getattr(found, name, None)
    return found if isinstance(found, nn.Module) else None


def block_split(family: Family, transformer: nn.Module, stages: int, wish: str) -> list[int]:
    """How many consecutive blocks each stage has: as wished (`10/9`), or such that the dearest stage is cheapest.

    Raises PlanError for a wish that does not fit the model.
    """
    blocks = [b for name in family.blocks for b in transformer.get_submodule(name).children()]
    if not wish:
        return cut.stages([block_cost(family, block) for block in blocks], stages)
    sizes = [int(n) for n in wish.split("/")]
    if len(sizes) != stages or sum(sizes) != len(blocks):
        raise PlanError(
            f"plan: split={wish} must be {stages} numbers that add up to the model's {len(blocks)} blocks; "
            f"without it the split is {'/'.join(map(str, block_split(family, transformer, stages, '')))}"
        )
    return sizes


def block_cost(family: Family, block: nn.Module) -> float:
    """Multiplications of a block for an image token, estimated from its weights, for a large picture.

    Modulation counts nothing, since it is computed once a step; text modules count for as many tokens as there are.
    """
    once = tuple(p.partition(".*.")[2] for p in (*family.per_step, *family.per_request) if ".*." in p)
    cost = 0.0
    for path, module in block.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d) or weight is None or path.startswith(once):
            continue
        cost += weight.numel() * (_TEXT / _TOKENS if path.startswith(family.text) else 1.0)
    for name in family.sites:
        if (site := getattr(block, name, None)) is not None:
            cost += 2 * (_TOKENS + (_TEXT if family.joint else 0)) * site.inner_dim
    return cost
