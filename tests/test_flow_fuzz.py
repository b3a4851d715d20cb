"""Random programs on deferred tensors equal the same programs on plain ones, to the last bit."""

from __future__ import annotations

import gc
from collections import deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import LAST, Program, Step, World
from torch import Tensor

from ditpar.dataflow import rules
from ditpar.dataflow.flow import DEEPEST, Flow
from ditpar.errors import StaleError

STEPS = st.lists(st.tuples(st.integers(0, LAST), *[st.integers(0, 40)] * 3), max_size=24)
FUZZ = settings(max_examples=250, deadline=None, derandomize=True)


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
