"""Faults of ranks: the caller gets an exception that names the rank, within seconds, and nothing is left behind."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diffusers
import psutil
import pytest
import torch
from test_conventions import lora_state

import ditpar
from ditpar.errors import GangError
from ditpar.gang import gang
from ditpar.gang.calls import Command
from ditpar.gang.modelfolder import DEFAULT_MODEL

PROMPT = "castle"
LONG: dict[str, Any] = {"num_inference_steps": 400, "output_type": "latent", "generator": 1}
SHORT: dict[str, Any] = {"num_inference_steps": 2, "output_type": "latent", "generator": 1}


@pytest.fixture(scope="module")
def pipe() -> Iterator[Any]:
    with ditpar.load(DEFAULT_MODEL, plan="ulysses=2", device="cpu") as loaded:
        loaded.set_progress_bar_config(disable=True)
        yield loaded


def pids_of(pipe: Any) -> list[int]:
    return [m["pid"] for m in pipe.memory()]


def processes(pipe: Any) -> list[int]:
    """Fork server, host and ranks."""
    return list(pipe._gang.launcher.pids)


PRELUDE = """
import gc, os, signal, sys, time, torch
from ditpar.gang.rank import Rank
rank = next(o for o in gc.get_objects() if type(o) is Rank)
"""


def on_ranks(pipe: Any, code: str) -> Any:
    """Runs Python code on every rank, where `rank` is the Rank."""
    pipe.memory()  # which starts the gang anew if need be
    pipe._gang.run(Command("set", ("act",), (functools.partial(exec, PRELUDE + code, {}),)))
    return pipe._gang.run(Command("call", ("act",)))


def during(pipe: Any, act: Callable[[], Any]) -> tuple[GangError, float]:
    """Runs a long request and does something to it at step 3; the error, and the seconds from act to error."""
    begun: list[float] = []

    def callback(_: Any, step: int, *__: Any) -> dict[str, Any]:
        if step == 3:
            begun.append(time.monotonic())
            act()
        return {}

    with pytest.raises(GangError) as caught:
        pipe(PROMPT, **LONG, callback_on_step_end=callback)
    return caught.value, time.monotonic() - begun[0]


def gone(pids: list[int], within: float = 5.0) -> bool:
    """Whether no process is left; a zombie counts, but for those that are left to init when the caller itself is killed."""

    def left(pid: int) -> bool:
        try:
            process = psutil.Process(pid)
            return process.status() != psutil.STATUS_ZOMBIE or process.ppid() != 1
        except psutil.NoSuchProcess:
            return False

    end = time.monotonic() + within
    while any(map(left, pids)):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def hit(pid: int, how: signal.Signals) -> None:
    """Kills or stops a process, and waits until it is: that takes effect a moment after the signal."""
    os.kill(pid, how)
    if how == signal.SIGKILL:
        assert gone([pid])
    while how == signal.SIGSTOP and psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank(pipe: Any, rank: int) -> None:
    pids = pids_of(pipe)
    error, seconds = during(pipe, lambda: os.kill(pids[rank], signal.SIGKILL))
    assert error.rank == rank and f"rank {rank} (pid {pids[rank]}) died: killed by SIGKILL" in str(error)
    assert seconds < 5 and gone(pids)
    assert pipe(PROMPT, **SHORT).images.shape == (1, 256, 32)  # a new gang


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank(pipe: Any, rank: int) -> None:
    pids = pids_of(pipe)
    error, seconds = during(pipe, lambda: os.kill(pids[rank], signal.SIGSTOP))
    assert error.rank == rank and "it is stopped" in str(error)
    assert f"rank {1 - rank}:\n" in error.remote_traceback and "request.py" in error.remote_traceback
    assert seconds < 8 and gone(pids)


def test_a_rank_that_stops_amid_a_message_holds_up_no_one(pipe: Any) -> None:
    pids = pids_of(pipe)
    os.kill(pids[1], signal.SIGSTOP)
    begun = time.monotonic()
    with pytest.raises(GangError, match="it is stopped") as caught:
        pipe._gang.run(Command("set", ("act",), (torch.zeros(1 << 24),)))
    assert caught.value.rank == 1 and time.monotonic() - begun < 8 and gone(pids)
    half = "rank.wire.sock.sendall(b'a' + (1 << 30).to_bytes(8, 'little') + bytes(1000)); os.kill(os.getpid(), signal.SIGSTOP)"
    begun = time.monotonic()
    with pytest.raises(GangError, match="it is stopped") as caught:
        on_ranks(pipe, f"if rank.number == 1: {half}")
    assert caught.value.rank == 1 and time.monotonic() - begun < 10


def test_a_rank_that_raises_alone(pipe: Any) -> None:
    pids = pids_of(pipe)
    begun = time.monotonic()
    with pytest.raises(GangError, match="rank 1 raised ZeroDivisionError: division by zero") as caught:
        on_ranks(pipe, "if rank.number == 1: 1 / 0\nrank.pipe._ditpar.mesh.world.max(1)")
    assert caught.value.rank == 1 and "Traceback" in caught.value.remote_traceback
    assert time.monotonic() - begun < 8 and gone(pids)


def test_ranks_that_raise_apart_are_ended_and_alike_are_not(pipe: Any) -> None:
    pids = pids_of(pipe)
    with pytest.raises(ZeroDivisionError) as alike:
        on_ranks(pipe, "1 / 0")
    assert pids_of(pipe) == pids and "1 / 0" not in str(alike.value) and "Traceback" in str(alike.value.__cause__)
    with pytest.raises(GangError, match="rank 0 raised RuntimeError: 0"):
        on_ranks(pipe, "raise RuntimeError(str(rank.number))")
    assert gone(pids)


def test_a_rank_that_crashes_leaves_its_stack(pipe: Any) -> None:
    pids = pids_of(pipe)
    with pytest.raises(GangError, match="rank 1 .* died: killed by SIGSEGV") as caught:
        on_ranks(pipe, "if rank.number: os.kill(os.getpid(), signal.SIGSEGV)")
    assert "Segmentation fault" in caught.value.remote_traceback and "in _do" in caught.value.remote_traceback
    with pytest.raises(GangError, match="rank 1 .* died: exit status 1") as caught:
        on_ranks(pipe, "if rank.number: sys.exit('enough')")
    assert "SystemExit: enough" in caught.value.remote_traceback and gone(pids)


def test_a_step_that_takes_too_long_names_the_rank_that_others_wait_for() -> None:
    with ditpar.load(DEFAULT_MODEL, plan="ulysses=2", patience=(60.0, 2.0), device="cpu") as pipe:
        pipe.set_progress_bar_config(disable=True)
        on_ranks(
            pipe,
            """
def slow(*_):
    if rank.number == 1 and rank.request.steps == 6:
        time.sleep(1000)
rank.pipe.transformer.register_forward_pre_hook(slow)""",
        )
        pids = pids_of(pipe)
        times: list[float] = []
        with pytest.raises(GangError, match="rank 1, for which the others wait, has not finished a step") as caught:
            pipe(PROMPT, **LONG, callback_on_step_end=lambda *_: times.append(time.monotonic()) or {})
        assert len(times) == 6 and caught.value.rank == 1 and "in slow" in caught.value.remote_traceback
        limit = max(2.0, 20 * max(b - a for a, b in itertools.pairwise(times)))
        assert time.monotonic() - times[-1] < limit + 5 and gone(pids)


def test_all_ranks_stuck_outside_of_steps_are_given_up_with_their_stacks(pipe: Any) -> None:
    pids = pids_of(pipe)
    before, pipe._gang.patience = pipe._gang.patience, (3.0, 1.0)
    try:
        begun = time.monotonic()
        with pytest.raises(GangError, match="the ranks have not finished a step for 3 s") as caught:
            on_ranks(pipe, "time.sleep(1000)")
        assert time.monotonic() - begun < 10 and gone(pids)
        assert caught.value.rank is None and caught.value.remote_traceback.count("in _do") == 2
    finally:
        pipe._gang.patience = before


def test_a_long_callback_is_no_hang_and_a_rank_that_dies_meanwhile_is_noticed(
    pipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gang, "SILENT_S", 1.0)
    monkeypatch.setattr(gang, "DEAF_S", 2.0)
    before, pipe._gang.patience = pipe._gang.patience, (2.5, 2.5)
    try:
        slept = pipe(PROMPT, **SHORT, callback_on_step_end=lambda *_: time.sleep(3) or {}).images
    finally:
        pipe._gang.patience = before
    assert torch.equal(slept, pipe(PROMPT, **SHORT).images)

    def callback(given: Any, step: int, *_: Any) -> dict[str, Any]:
        os.kill(pids[1], signal.SIGKILL)
        given.vae.enable_slicing()
        return {}

    pids = pids_of(pipe)
    with pytest.raises(GangError, match="rank 1 .* died"):
        pipe(PROMPT, **SHORT, callback_on_step_end=callback)


def test_ranks_that_end_while_idle_are_replaced_without_ado(pipe: Any, caplog: pytest.LogCaptureFixture) -> None:
    want = pipe(PROMPT, **SHORT).images
    for act in (signal.SIGKILL, signal.SIGSTOP):
        pids = pids_of(pipe)
        hit(pids[1], act)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "ditpar"):
            assert torch.equal(pipe(PROMPT, **SHORT).images, want)
        assert "rank 1" in caplog.text and "started anew" in caplog.text and gone(pids)


@pytest.mark.parametrize("which", [0, 1])
def test_the_fork_server_and_the_host_may_be_killed(pipe: Any, which: int) -> None:
    want = pipe(PROMPT, **SHORT).images
    before = processes(pipe)
    error, seconds = during(pipe, lambda: os.kill(before[which], signal.SIGKILL))
    assert "died" in str(error) and seconds < 8
    assert torch.equal(pipe(PROMPT, **SHORT).images, want)  # all started anew
    assert gone(before[1:] if which else before)


def test_what_was_changed_is_there_again_after_a_restart(pipe: Any, tmp_path: Path) -> None:
    stock = diffusers.FluxPipeline.from_pretrained(DEFAULT_MODEL, dtype=torch.float32)
    state = {k.removeprefix("transformer."): v for k, v in lora_state(stock).items()}
    stock.save_lora_weights(tmp_path, transformer_lora_layers=state)
    plain = pipe(PROMPT, **SHORT).images
    pipe.load_lora_weights(tmp_path, adapter_name="a")
    pipe.set_adapters("a", 0.9)
    pipe.set_adapters("a", 0.7)
    pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_config(pipe.scheduler.config, shift=3.0)
    want = pipe(PROMPT, **SHORT).images
    assert len(pipe._history) == 2  # a setting takes the place of the one before
    hit(pids_of(pipe)[0], signal.SIGKILL)
    assert torch.equal(pipe(PROMPT, **SHORT).images, want) and not torch.equal(want, plain)

    file = next(tmp_path.iterdir())
    moved = file.rename(tmp_path.with_suffix(".moved"))
    hit(pids_of(pipe)[0], signal.SIGKILL)
    with pytest.raises(GangError, match="pipe.load_lora_weights could not be done again"):
        pipe(PROMPT, **SHORT)
    moved.rename(file)
    assert torch.equal(pipe(PROMPT, **SHORT).images, want)
    pipe.unload_lora_weights()
    assert len(pipe._history) == 0


def test_a_gang_is_of_the_process_that_made_it(pipe: Any) -> None:
    """A fork of the caller can neither use the ranks nor end them, and holds none of their sockets."""
    pids = pids_of(pipe)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            pipe(PROMPT, **SHORT)
        except GangError as error:
            os.write(write, str(error).encode())
        finally:
            with contextlib.suppress(BaseException):
                pipe.close()
            os._exit(0)
    os.waitpid(child, 0)
    assert f"belongs to process {os.getpid()}" in os.read(read, 1000).decode()
    pipe(PROMPT, **SHORT)
    assert pids_of(pipe) == pids


CALLER = """
import os, sys, time, ditpar
from diffusers import FlowMatchEulerDiscreteScheduler
class Mine(FlowMatchEulerDiscreteScheduler):
    pass
pipe = ditpar.load(plan="cfg=2", device="cpu")
pipe.set_progress_bar_config(disable=True)
pipe.scheduler, stock = Mine.from_config(pipe.scheduler.config), pipe.scheduler
try:
    pipe("castle", num_inference_steps=2)
except AttributeError as error:
    assert "Mine" in str(error)  # a class that only this script knows
pipe.scheduler = stock
if not os.fork():  # a child that outlives this process, with copies of its descriptors
    time.sleep(30)
    os._exit(0)
def told(_, step, *__):
    if step == 2:
        print(*pipe._gang.launcher.pids, flush=True)
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
    (tmp_path / "tmp").mkdir()
    env = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    caller = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=tmp_path, env=env
    )
    assert caller.stdout is not None
    pids = [int(p) for p in caller.stdout.readline().split()]
    assert len(pids) == 4 and all(psutil.pid_exists(p) for p in pids)
    begun = time.monotonic()
    caller.send_signal(how)
    caller.wait(20)
    assert gone(pids, 5) and time.monotonic() - begun < 8
    if how == signal.SIGINT:
        assert caller.returncode == 130 and caller.stdout.readline() == "interrupted\n"
    caller.stdout.close()
    assert os.listdir(tmp_path / "tmp") == [] and len(os.listdir(tmp_path)) == 2


def test_close_leaves_no_process_thread_or_descriptor() -> None:
    def now() -> tuple[set[int], int, set[str]]:
        fds = {
            os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{fd}")
        }
        return {p.pid for p in psutil.Process().children(recursive=True)}, threading.active_count(), fds

    with ditpar.load(DEFAULT_MODEL, device="cpu"):
        pass  # whatever the libraries start for good
    before = now()
    pipe = ditpar.load(DEFAULT_MODEL, device="cpu")
    started = processes(pipe)
    pipe.close()
    pipe.close()
    assert gone(started[1:]) and now() == before
    with pytest.raises(GangError, match="closed"):
        pipe(PROMPT)


def test_the_last_gang_to_close_ends_the_fork_server() -> None:
    code = """
import ditpar, psutil
first, second = ditpar.load(device="cpu"), ditpar.load(device="cpu")
server = first._gang.launcher.pids[0]
assert server == second._gang.launcher.pids[0]
first.close()
assert psutil.pid_exists(server)
del second
assert not psutil.pid_exists(server) and not psutil.Process().children(recursive=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
