"""Faults of ranks: the caller gets an exception that names the rank, within seconds, and nothing is left behind."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import ditpar
from ditpar.errors import GangError
from ditpar.gang.modelfolder import DEFAULT_MODEL

PROMPT = "castle"
LONG: dict[str, Any] = {"num_inference_steps": 400, "output_type": "latent", "generator": 1}
SHORT: dict[str, Any] = {"num_inference_steps": 2, "output_type": "latent", "generator": 1}


@pytest.fixture(scope="module")
def pipe() -> Iterator[Any]:
    with ditpar.load(DEFAULT_MODEL, plan="ulysses=2", patience=(120.0, 15.0)) as loaded:
        loaded.set_progress_bar_config(disable=True)
        yield loaded


def during(pipe: Any, act: Any, **more: Any) -> tuple[GangError, float]:
    """Runs a long request, does something to it at step 3; the error, and the seconds from act to error."""
    begun: list[float] = []

    def callback(_: Any, step: int, *__: Any) -> dict[str, Any]:
        if step == 3:
            begun.append(time.monotonic())
            act()
        return {}

    with pytest.raises(GangError) as caught:
        pipe(PROMPT, **{**LONG, **more}, callback_on_step_end=callback)
    return caught.value, time.monotonic() - begun[0]


def gone(pids: list[int], within: float = 5.0) -> bool:
    end = time.monotonic() + within
    while time.monotonic() < end:
        alive = [p for p in pids if psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE]
        if not alive:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank(pipe: Any, rank: int) -> None:
    pids = [m["pid"] for m in pipe.memory()]
    error, seconds = during(pipe, lambda: os.kill(pids[rank], signal.SIGKILL))
    assert error.rank == rank and f"rank {rank} (pid {pids[rank]}) died: killed by SIGKILL" in str(error)
    assert seconds < 5 and gone(pids)
    assert pipe(PROMPT, **SHORT).images.shape == (1, 256, 32)  # a new gang


def test_a_stopped_rank(pipe: Any) -> None:
    pids = [m["pid"] for m in pipe.memory()]
    error, seconds = during(pipe, lambda: os.kill(pids[1], signal.SIGSTOP))
    assert error.rank == 1 and "is stopped" in str(error) and "rank 0:" in error.remote_traceback
    assert seconds < 8 and gone(pids)


def test_a_rank_that_raises_alone(pipe: Any) -> None:
    """A signal handler in the rank's own process stands for any fault that only one rank meets."""
    pipe(PROMPT, **SHORT)
    pids = [m["pid"] for m in pipe.memory()]
    error, seconds = during(pipe, lambda: os.kill(pids[1], signal.SIGINT))
    assert error.rank == 1
    assert "KeyboardInterrupt" in str(error) or "died" in str(error)
    assert seconds < 8 and gone(pids)


def test_a_rank_that_raises_in_its_own_code_gives_its_traceback(pipe: Any) -> None:
    with pytest.raises(GangError) as caught:
        pipe._now(pipe._command("call", ("no_such_method",), only_rank=1))
    assert caught.value.rank == 1 and "Traceback" in caught.value.remote_traceback
    assert "no_such_method" in str(caught.value)


def test_ranks_that_all_hang_are_given_up_with_their_stacks() -> None:
    with ditpar.load(DEFAULT_MODEL, plan="ulysses=2", patience=(12.0, 12.0)) as pipe:
        pids = [m["pid"] for m in pipe.memory()]
        pipe._now(pipe._command("set", ("hang",), (functools.partial(time.sleep, 1000),)))
        begun = time.monotonic()
        with pytest.raises(GangError, match="no rank gave a sign of life for 12 s") as caught:
            pipe._now(pipe._command("call", ("hang",)))
        assert time.monotonic() - begun < 20 and gone(pids)
        assert caught.value.rank is None and caught.value.remote_traceback.count("in _do") == 2


def test_what_was_changed_is_there_again_after_a_restart(pipe: Any) -> None:
    import diffusers
    from test_conventions import lora_state

    stock = diffusers.FluxPipeline.from_pretrained(DEFAULT_MODEL, torch_dtype=torch.float32)
    pipe.load_lora_weights(lora_state(stock), adapter_name="a")
    want = pipe(PROMPT, **SHORT).images
    os.kill(pipe.memory()[0]["pid"], signal.SIGKILL)
    with pytest.raises(GangError):
        pipe(PROMPT, **SHORT)
    assert torch.equal(pipe(PROMPT, **SHORT).images, want)
    pipe.unload_lora_weights()


def test_an_error_in_the_callers_callback_is_the_callers(pipe: Any) -> None:
    def callback(*_: Any) -> None:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        pipe(PROMPT, **SHORT, callback_on_step_end=callback)
    assert pipe(PROMPT, **SHORT).images.shape == (1, 256, 32)


CALLER = """
import sys, threading, ditpar
pipe = ditpar.load(plan="cfg=2")
pipe.set_progress_bar_config(disable=True)
server = pipe._gang._server.process.pid
def told(_, step, *__):
    if step == 2:
        print(server, *[m["pid"] for m in pipe._gang.memory()], flush=True)
    return {}
try:
    pipe("castle", num_inference_steps=500, generator=1, callback_on_step_end=told)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    raise SystemExit(130)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_nothing_outlives_a_caller_that_is_killed(how: int, tmp_path: Path) -> None:
    script = tmp_path / "caller.py"
    script.write_text(CALLER)  # no `if __name__ == "__main__"` in it
    caller = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=tmp_path
    )
    assert caller.stdout is not None
    pids = [int(p) for p in caller.stdout.readline().split()]
    assert len(pids) == 3 and all(psutil.pid_exists(p) for p in pids)
    caller.send_signal(how)
    caller.wait(20)
    assert gone(pids, 10)
    if how == signal.SIGINT:
        assert caller.returncode == 130 and "interrupted" in caller.stdout.read()
    assert os.listdir(tmp_path) == ["caller.py"]


def test_close_leaves_no_process_and_no_thread() -> None:
    threads = threading.active_count()
    children = set(psutil.Process().children(recursive=True))
    pipe = ditpar.load(DEFAULT_MODEL)
    started = [p.pid for p in set(psutil.Process().children(recursive=True)) - children]
    assert len(started) == 2  # the fork server and the rank
    pipe.close()
    assert gone(started) and threading.active_count() == threads
