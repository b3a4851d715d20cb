"""Random programs on deferred tensors equal the same programs on plain ones, to the last bit."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from banded import cuts
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import LAST, Program, Step, World, results, same
from torch import Tensor

from ditpar.dataflow import rules
from ditpar.dataflow.deferred import Deferred, resolve
from ditpar.errors import StaleError

STEPS = st.lists(st.tuples(st.integers(0, LAST), *[st.integers(0, 40)] * 3), max_size=24)
FUZZ = settings(max_examples=500, deadline=None, derandomize=True)


@FUZZ
@given(STEPS, st.integers(1, 4))
def test_programs(steps: list[Step], bands: int) -> None:
    program = Program([World(bands)])
    for step in steps:
        program.step(step)
    program.check()


@FUZZ
@given(STEPS)
def test_writes_that_nothing_deferred_takes_part_in(steps: list[Step]) -> None:
    """They are right, or refused: never wrong."""
    program = Program([World()], plain_writes=True)
    try:
        for step in steps:
            program.step(step)
        program.check()
    except StaleError:
        pass


@FUZZ
@given(STEPS)
def test_ghosts(steps: list[Step]) -> None:
    """A rank without values asks for the owner's at the same places, and has the same."""
    sent: deque[Tensor] = deque()

    def give(value: Tensor | None, *_: object) -> Tensor:
        assert value is not None
        sent.append(value.clone())
        return value

    def take(value: Tensor | None, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        assert value is None
        got = sent.popleft()
        assert got.shape == shape and got.dtype == dtype and got.device == device
        return got.contiguous()

    owner, ghost = World(share=give), World(owner=False, share=take)
    program = Program([owner, ghost])
    for step in steps:
        program.step(step)
        assert not sent
    program.check()
    assert not sent and owner.flow.forced == ghost.flow.forced


def pointwise() -> list[Any]:
    packets = [getattr(torch.ops.aten, name) for name in dir(torch.ops.aten)]
    found = [getattr(p, o) for p in packets if hasattr(p, "overloads") for o in p.overloads()]
    return [f for f in found if rules.is_pointwise(f) and not f._schema.is_mutable]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_pointwise_operations_give_the_same_bits_in_any_bands(dtype: torch.dtype) -> None:
    """So it is for all that rules.UNEVEN does not name."""
    random = torch.Generator().manual_seed(0)
    scalars = {"number": 0.7, "float": 0.7, "int": 2, "bool": False}
    checked = set()
    for func in pointwise():
        asked = func._schema.arguments
        for shape, low in (((2, 37, 13), -2.0), ((1, 37, 16), 0.05)):
            tensors = [(torch.rand(shape, generator=random) * 2 + low).to(dtype) for _ in asked]
            for scalar in (0.7, 1, *rules.EXACT_POWERS):
                given = {**scalars, "number": scalar}
                found = [
                    t if str(a.type) == "Tensor" else given.get(str(a.type), a.default_value)
                    for a, t in zip(asked, tensors, strict=True)
                ]
                args = [value for a, value in zip(asked, found, strict=True) if not a.kwarg_only]
                kwargs = {a.name: scalar for a in asked if a.kwarg_only and a.name in ("alpha", "value")}
                if not isinstance(args[0], Tensor) or not rules.exact(func, args, kwargs):
                    continue
                try:
                    whole = func(*args, **kwargs)
                except (RuntimeError, TypeError):
                    break  # for other kinds of operands
                if isinstance(whole, Tensor) and whole.shape == shape:
                    checked.add(func.overloadpacket)
                    bands = [func(*[rows(a, *span) for a in args], **kwargs) for span in cuts(37)]
                    assert same(torch.cat(bands, 1), whole), (func, scalar)
    assert len(checked) > 80


def rows(value: Any, lo: int, hi: int) -> Any:
    return value.narrow(1, lo, hi - lo) if isinstance(value, Tensor) else value


def test_histories_of_many_steps_neither_grow_nor_go_deep() -> None:
    """300 steps, each from the last three outputs, with nothing read until the end."""
    world = World()
    want = x = torch.zeros(1, 5, 3)
    history: deque[Tensor] = deque(maxlen=3)
    plain: deque[Tensor] = deque(maxlen=3)
    live = []
    for k in range(0, 1500, 5):
        world.call(k)
        history.append(world.variables.pop() * 0.5)
        plain.append(torch.zeros_like(want) + results(k) * 0.5)
        for noise, known in zip(history, plain, strict=True):
            for _ in range(5):
                x, want = x + noise, want + known
        world.run()
        live.append(len(world.flow._live))
    assert max(live[10:]) == max(live[4:10]) < 100
    assert torch.equal(resolve(x), want) and not world.flow.forced
    del history, x, noise
    assert len(world.flow._live) == 0


def test_long_chains() -> None:
    """A chain that waits for rows is cut off where it would go too deep; one whose rows are there goes on."""
    world = World()
    world.call(0)
    x, want = world.variables[-1], results(0)
    for _ in range(500):
        x, want = x + 1, want + 1
    assert torch.equal(resolve(x), want)
    assert [count for (what, _), count in world.flow.forced.items() if what == "aten.add.Tensor"] == [1]
    world.call(5)
    y, want = world.variables[-1], results(5)
    world.run()
    for _ in range(3000):
        y, want = y + 1, want + 1
    assert isinstance(y, Deferred) and y.pending
    assert torch.equal(y.value(), want) and sum(world.flow.forced.values()) == 1
