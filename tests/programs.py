"""Small random programs on tensors, run on plain ones and on deferred ones side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from banded import cuts
from torch import Tensor

from ditpar.dataflow.deferred import Deferred, NotReady, resolve
from ditpar.dataflow.flow import Flow

Step = tuple[int, int, int, int]
"""An instruction: which operation, and its operands among the variables."""


def fits(target: Tensor, shape: Sequence[int]) -> Tensor:
    if target.shape != torch.Size(shape):
        raise ValueError("out= would be resized")
    return target


LOCAL: Sequence[Callable[..., Any]] = (
    lambda a, b: a + b,
    lambda a, b: a - 0.5 * b,
    lambda a: 3 * a,
    lambda a: a / 4,
    lambda a, b: torch.add(a, b, alpha=2),
    lambda a, b: torch.where(a > b, a, 0.25),
    lambda a, b, c: torch.where(a > 1, b, c),
    lambda a, b: torch.where(b.bool(), 1.5, a),
    lambda a, b, c: torch.clamp(a, min=b, max=c),
    lambda a: a.clamp(-1, max=2.5),
    lambda a, b: torch.lerp(a, b, 0.3),
    lambda a, b, c: torch.addcmul(a, b, c, value=0.5),
    lambda a, b: a * b.flatten()[0:1].sum(),
    lambda a: a * torch.tensor(0.3, dtype=torch.float64),
    lambda a: a.round().int() * 0.5,
    lambda a: a.to(torch.bfloat16),
    lambda a: a.double(),
    lambda a: (a**2 + 1) ** 0.5,
    lambda a: torch.maximum(a, a),
    lambda a, b: torch.cat([a, b], dim=-1),
    lambda a, b: torch.cat([a, b, a], dim=1),
    lambda a: torch.cat([a], dim=1),
    lambda a, b: torch.cat([b, a]),
    lambda a, b: torch.stack([a, b], dim=1),
    lambda a, b: torch.stack([a, b], dim=-1)[..., 1],
    lambda a: torch.linalg.vector_norm(a, dim=-1, keepdim=True),
    lambda a: a.amax(dim=(0,)),
    lambda a: a.std(dim=-1, keepdim=True),
    lambda a: a.flip(-1),
    lambda a: a.cumsum(-1),
    lambda a, b: torch.einsum("k,bkc...->bc...", torch.tensor([0.5, -1.25]), torch.stack([a, b], dim=1).float()),
    lambda a, b: torch.einsum("brc,brc->br", a.float(), b.float()),
    lambda a: torch.zeros_like(a),
    lambda a: a.new_ones(a.shape),
    lambda a: a.clone(),
    lambda a: a.to(a.dtype, copy=True),
)
VIEWS: Sequence[Callable[..., Any]] = (
    lambda a: a[:, 1:],
    lambda a: a[:, -3:-1],
    lambda a: a[:, :2],
    lambda a: a[..., 1:],
    lambda a: a[:, ::2],
    lambda a: a[0],
    lambda a: a[:, 0:1],
    lambda a: a[-1:, None],
    lambda a: a.unsqueeze(-1),
    lambda a: a.squeeze(),
    lambda a: a.squeeze(1),
    lambda a: a.squeeze((-1, 1)),
    lambda a: a.transpose(-1, -2),
    lambda a: a.permute(*range(a.ndim - 1, -1, -1)),
    lambda a: a.mT,
    lambda a: a.chunk(2, dim=1),
    lambda a: a.split([1, a.shape[1] - 1], dim=1),
    lambda a: a.chunk(2)[-1],
    lambda a: a.unbind(-1)[0],
    lambda a: a.view(*a.shape, 1),
    lambda a: a.reshape(*a.shape[:2], -1),
    lambda a: a.expand(2, *a.shape),
    lambda a: a[:1].expand(3, *a.shape[1:]),
    lambda a, b: a.expand_as(b),
    lambda a: a.detach(),
    lambda a: torch.einsum("abc->acb", a),
)
WRITES: Sequence[Callable[..., Any]] = (
    lambda a, b: a.add_(b),
    lambda a: a.mul_(2),
    lambda a, b: a.copy_(b),
    lambda a: a.__setitem__((slice(None), slice(1, 2)), 5.0),
    lambda a: a[:, -1:].sub_(1.5),
    lambda a, b: a[..., 0].copy_(b[..., 0]),
    lambda a, b: a.clamp_(max=b),
    lambda a: a.zero_(),
    lambda a, b: a.masked_fill_(b > 0, -1),
    lambda a, b: a.addcmul_(b, b, value=0.5),
    lambda a, b: torch.mul(b, 0.5, out=fits(a, b.shape)),
    lambda a: a.fill_(0.75),
    lambda a: a.sub_(a),
    lambda a, b: a.lerp_(b, 0.5),
    lambda a, b, c: torch.stack([b, c], out=fits(a, (2, *b.shape))),
)
"""They make no new variable."""
THROUGH_VIEWS = WRITES[4:6]
CROSSING: Sequence[Callable[..., Any]] = (
    lambda a: a.sum(),
    lambda a: a.mean(dim=1, keepdim=True),
    lambda a: a.flatten(),
    lambda a: a.roll(1, dims=1),
    lambda a: a.float().sort(dim=1),
    lambda a, b: a.float() @ b.float().mT,
    lambda a: a[:, [0, -1]],
    lambda a: a[a > 0],
    lambda a, b: a + float(b.flatten()[0]),
    lambda a: torch.sigmoid(a),
    lambda a: a.cumsum(1),
    lambda a: torch.from_numpy(a.float().numpy().copy()),
    lambda a: a.unfold(1, 2, 1),
    lambda a: a.diagonal(),
    lambda a: a.unbind(1)[0],
    lambda a: a.view(-1, *a.shape[2:]),
)
OPERATIONS = (*LOCAL, *VIEWS, *WRITES, *CROSSING)
CALL, PROGRESS = len(OPERATIONS), len(OPERATIONS) + 1
LAST = PROGRESS
SHAPES = ((1, 5, 3), (2, 5, 3), (2, 1, 3), (1, 5, 1), (2, 7, 2))


def results(k: int) -> Tensor:
    """What call k gives: quarters of small integers, so that values stay finite for a while."""
    random = torch.Generator().manual_seed(k)
    return torch.randint(-8, 9, SHAPES[k % len(SHAPES)], generator=random) / 4


class World:
    """One rank's side of a program: its variables, and its calls."""

    def __init__(self, bands: int = 3, owner: bool = True, share: Any = None) -> None:
        self.flow = Flow(self.run, owner, share)
        self.bands, self.calls = bands, 0
        self.pending: list[tuple[int, Deferred, list[tuple[int, int]]]] = []
        self.variables: list[Tensor] = []

    def call(self, k: int) -> None:
        value = results(k)
        deferred = self.flow.call(torch.empty_like(value, device="meta"), value.device, 1)
        self.pending.append((k, deferred, cuts(value.shape[1], self.bands)))
        self.variables.append(deferred)

    def progress(self) -> None:
        """The next band of the oldest pending call comes in."""
        for k, deferred, spans in self.pending[:1]:
            if spans and self.flow.owner:
                lo, hi = spans.pop(0)
                deferred.fill(lo, hi, results(k)[:, lo:hi].clone())

    def run(self) -> None:
        while self.pending:
            while self.pending[0][2] and self.flow.owner:
                self.progress()
            self.pending.pop(0)
        self.flow.ran()


def same(got: Any, want: Tensor) -> bool:
    return (
        got.dtype == want.dtype
        and got.shape == want.shape
        and torch.allclose(got.double(), want.double(), rtol=0, atol=0, equal_nan=True)
    )


def seen(write: Callable[..., Any], operands: Sequence[Tensor]) -> bool:
    """Whether a deferred tensor takes part in a write. A view of one that has its value is a plain tensor."""
    if write in THROUGH_VIEWS:
        return isinstance(operands[0], Deferred) and operands[0].pending
    return any(isinstance(operand, Deferred) for operand in operands)


class Program:
    """The same steps on plain tensors and in worlds of deferred ones.

    Args:
        plain_writes: whether to do writes that no deferred tensor takes part in, which can at best be refused later.
    """

    def __init__(self, worlds: Sequence[World], plain_writes: bool = False) -> None:
        self.worlds, self.plain_writes = worlds, plain_writes
        self.plain: list[Tensor] = []
        self.calls = 0
        for value in (results(7), torch.full((1,), 0.5), results(6)[:, :, :1].clone()):
            self.plain.append(value)
            for world in worlds:
                world.variables.append(value.clone())
        self.step((CALL, 0, 0, 0))

    def step(self, step: Step) -> None:
        what, *operands = step
        if what == CALL:
            self.plain.append(results(self.calls))
            for world in self.worlds:
                world.call(self.calls)
            self.calls += 1
        elif what == PROGRESS:
            for world in self.worlds:
                world.progress()
                self.look(world, operands)
        else:
            operation = OPERATIONS[what]
            used = operands[: operation.__code__.co_argcount]
            self.operate(operation, [operand % len(self.plain) for operand in used])

    def operate(self, operation: Callable[..., Any], places: list[int]) -> None:
        writes = operation in WRITES
        for world in self.worlds:
            mine = [world.variables[i] for i in places]
            if writes and not self.plain_writes and not seen(operation, mine):
                return
        try:
            out = operation(*[self.plain[i] for i in places])
        except (RuntimeError, IndexError, ValueError, TypeError):
            return  # the shapes do not fit
        self.keep(self.plain, out, writes)
        for world in self.worlds:
            self.keep(world.variables, operation(*[world.variables[i] for i in places]), writes)

    @staticmethod
    def keep(variables: list[Tensor], out: Any, writes: bool) -> None:
        if not writes:
            variables.extend([out] if isinstance(out, Tensor) else list(out))

    def look(self, world: World, operands: list[int]) -> None:
        """Some rows of a pending variable, before all are there."""
        place = operands[0] % len(self.plain)
        found, want = world.variables[place], self.plain[place]
        if not isinstance(found, Deferred) or not world.flow.owner or not found.pending:
            return
        lo, hi = sorted(o % (found.rows + 1) for o in operands[1:])
        try:
            rows = found.band(lo, hi)
        except NotReady:
            return
        assert same(rows, want.narrow(found.row, lo, hi - lo))

    def check(self) -> None:
        """All variables are equal; and are still so after each was written to."""
        self.compare()
        for place in range(len(self.plain)):
            self.operate(_DOUBLE, [place])
        self.compare()

    def compare(self) -> None:
        for place, want in enumerate(self.plain):
            for world in self.worlds:
                found = world.variables[place]
                assert tuple(found.shape) == tuple(want.shape) and found.dtype == want.dtype, place
                if isinstance(found, Deferred):
                    layouts = [[s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1] for t in (found, want)]
                    assert layouts[0] == layouts[1], place
                assert same(resolve(found), want), place


_DOUBLE = WRITES[1]
