"""A gang whose ranks are the stages of a pipeline: the same picture as in one process, and errors that come at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from parity import distance
from test_gang import LONG, PROMPT, gone, pids_of

import ditpar
from ditpar.errors import GangError
from ditpar.gang.modelfolder import DEFAULT_MODEL

EXACT = 1e-5
FEW: dict[str, Any] = {"num_inference_steps": 4, "output_type": "latent", "height": 128, "width": 128}


@pytest.fixture(scope="module")
def pipe() -> Iterator[Any]:
    with ditpar.load(DEFAULT_MODEL, plan="pipe=3,patches=4", device="cpu", trace=True) as loaded:
        loaded.set_progress_bar_config(disable=True)
        yield loaded


class Watch:
    """A progress bar that does something in the middle of the fourth step."""

    def __init__(self, act: Any) -> None:
        self.act, self.n = act, 0
        self.acted = 0.0

    def update(self, n: int) -> None:
        self.n += n
        if self.n == 4:
            threading.Timer(0.02, self._do).start()

    def _do(self) -> None:
        self.acted = time.monotonic()
        self.act()

    def close(self) -> None:
        pass


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_any_stage_that_ends_within_a_step_gives_its_error_in_seconds(pipe: Any, rank: int, how: Any) -> None:
    want = pipe(PROMPT, generator=5, **FEW).images
    pids = pids_of(pipe)
    watch = Watch(lambda: os.kill(pids[rank], how))
    vars(pipe)["progress_bar"] = lambda total: watch
    try:
        with pytest.raises(GangError) as caught:
            pipe(PROMPT, **LONG)
        seconds = time.monotonic() - watch.acted
    finally:
        del vars(pipe)["progress_bar"]
    assert caught.value.rank == rank and seconds < 8 and gone(pids)
    assert torch.equal(pipe(PROMPT, generator=5, **FEW).images, want)  # a new gang, and nothing of the old request


def test_whole_steps_are_those_of_one_device() -> None:
    with ditpar.load(DEFAULT_MODEL, plan="pipe=2,warmup=9", device="cpu") as staged:
        got = staged(PROMPT, generator=5, **FEW).images
    with ditpar.load(DEFAULT_MODEL, plan="single", device="cpu") as single:
        want = single(PROMPT, generator=5, **FEW).images
    assert distance(got, want) <= EXACT


def test_events_of_all_stages_come_with_the_result(pipe: Any) -> None:
    pipe(PROMPT, generator=5, **FEW)
    assert len(pipe.events) == 3
    for rank, events in enumerate(pipe.events):
        units = [e for e in events if e.what == "compute"]
        # Two branches: one whole step each, then three steps of four bands.
        assert len(units) == 2 * (1 + 3 * 4)
        assert {tuple(e.facts["blocks"]) for e in units} == {tuple(units[0].facts["blocks"])}
        names = {e.name for e in events if e.what in ("send", "wait")}
        assert "pipe" in names and ("pipe_back" in names) == (rank in (0, 2))


def test_an_interrupt_from_another_thread(pipe: Any) -> None:
    watch = Watch(lambda: setattr(pipe, "_interrupt", True))
    vars(pipe)["progress_bar"] = lambda total: watch
    try:
        pipe(PROMPT, **LONG)
    finally:
        del vars(pipe)["progress_bar"]
    assert 4 <= watch.n < 40
