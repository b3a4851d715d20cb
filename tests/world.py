"""Test harness: a world of ranks on this machine's CPU that stays up for many cases.

A *zygote* process imports the heavy libraries once and forks the ranks, so that a world starts in a fraction of a
second, also again after a case broke it. Each case gets a fresh default process group (gloo).

    def total(value):                                  # runs on every rank, at module level of a test file
        x = torch.tensor(float(value + dist.get_rank()))
        dist.all_reduce(x)
        return x.item()

    def test_total(world):                             # fixture in conftest.py, 2 ranks unless parametrised
        assert world.run(total, 1) == [3.0, 3.0]

The same file is run as a script for the zygote.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import importlib.util
import inspect
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
GRACE = 1.0
"""Seconds that the other ranks get to report after one has raised or died; then their stacks are taken."""


class RankError(AssertionError):
    """A rank raised, died or did not answer in time; the message has the rank's number, traceback or stacks."""


class World:
    """`size` ranks, started at the first case and again after each case that broke them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._ranks: list[_Rank] = []
        self._folder = tempfile.TemporaryDirectory(prefix="world-")
        self._cases = 0

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0, **kwargs: Any) -> list[Any]:
        """`function(*args, **kwargs)` on every rank; the ranks' results in order.

        The function must stand at module level, so that the ranks can find it by file and name; arguments and results
        are pickled. Raises RankError when a rank raises, dies or takes longer than `timeout` seconds, and ends the
        world then.
        """
        if "<" in function.__qualname__:
            raise TypeError(f"{function.__qualname__} must stand at module level for the ranks to find it")
        if not self._ranks:
            self._ranks = [_zygote().fork(rank, Path(self._folder.name)) for rank in range(self.size)]
        self._cases += 1
        store = Path(self._folder.name) / f"store-{self._cases}"
        case = (function.__module__, inspect.getsourcefile(function), function.__qualname__, self.size, str(store))
        payload = pickle.dumps((args, kwargs))
        done = False
        try:
            for rank in self._ranks:
                rank.start(case, payload)
            results = self._collect(function.__qualname__, timeout)
            done = True
            return results
        finally:
            if not done:
                self.kill()

    def _collect(self, name: str, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        faults: dict[int, str] = {}
        pending: dict[Any, _Rank] = {rank.connection: rank for rank in self._ranks}
        deadline = time.monotonic() + timeout
        while pending and (remaining := deadline - time.monotonic()) > 0:
            for connection in wait(list(pending), remaining):
                rank = pending.pop(connection)
                try:
                    ok, value = pickle.loads(rank.connection.recv_bytes())
                except EOFError:
                    ok, value = False, f"died: {rank.cause_of_death()}\n{rank.log()}"
                if ok:
                    results[rank.number] = value
                else:
                    faults[rank.number] = value
                    deadline = min(deadline, time.monotonic() + GRACE)
        if not pending and not faults:
            return [results[number] for number in range(self.size)]
        late = f"no answer after {timeout:g} s" if not faults else f"still running {GRACE:g} s later"
        for rank in pending.values():
            faults[rank.number] = f"{late}; its stacks:\n{rank.stacks()}"
        report = "\n".join(f"--- rank {number} of {self.size}: {faults[number]}" for number in sorted(faults))
        raise RankError(f"{name}: {len(faults)} of {self.size} ranks failed\n{report}")

    def kill(self) -> None:
        """Ends all ranks at once; the next case starts new ones."""
        for rank in self._ranks:
            rank.kill()
        self._ranks = []

    def close(self) -> None:
        self.kill()
        self._folder.cleanup()

    @property
    def pids(self) -> list[int]:
        return [rank.pid for rank in self._ranks]


class Worlds:
    """The session's worlds by size."""

    def __init__(self) -> None:
        self._worlds: dict[int, World] = {}

    def __call__(self, size: int) -> World:
        return self._worlds.setdefault(size, World(size))

    def close(self) -> None:
        for world in self._worlds.values():
            world.close()
        if _running:
            _running.pop().close()


class _Rank:
    """The parent's end of one rank."""

    def __init__(self, number: int, pid: int, connection: Connection, log: Path) -> None:
        self.number, self.pid, self.connection, self._log = number, pid, connection, log
        self._seen = 0

    def start(self, case: tuple[Any, ...], payload: bytes) -> None:
        self._seen = self._log.stat().st_size if self._log.exists() else 0
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a rank that died in between: seen at recv
            self.connection.send_bytes(pickle.dumps(case))
            self.connection.send_bytes(payload)

    def log(self) -> str:
        """What the rank wrote during this case."""
        with self._log.open(errors="replace") as file:
            file.seek(self._seen)
            return file.read()

    def stacks(self) -> str:
        """All threads' stacks of a running rank; a stopped process cannot give them."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
        deadline = time.monotonic() + 1
        while time.monotonic() < deadline:
            text = self.log()
            if "most recent call first" in text:
                time.sleep(0.1)  # let it finish writing
                return self.log()
            time.sleep(0.02)
        return f"none: the process does not react\n{self.log()}"

    def cause_of_death(self) -> str:
        return _zygote().reap(self.pid)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.connection.close()
        _zygote().reap(self.pid)


class _Zygote:
    """The parent's end of the process that forks ranks."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        }
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
        )
        theirs.close()
        self._socket = ours

    def fork(self, number: int, folder: Path) -> _Rank:
        ours, theirs = socket.socketpair()
        log = folder / f"rank-{number}.log"
        socket.send_fds(self._socket, [pickle.dumps(("fork", number, str(log)))], [theirs.fileno()])
        theirs.close()
        return _Rank(number, self._answer(), Connection(ours.detach()), log)

    def reap(self, pid: int) -> str:
        """Waits for a dead child; says how it ended."""
        self._socket.sendall(pickle.dumps(("reap", pid, "")))
        status = self._answer()
        if os.WIFSIGNALED(status):
            return f"by {signal.Signals(os.WTERMSIG(status)).name}"
        return f"exit code {os.waitstatus_to_exitcode(status)}"

    def _answer(self) -> int:
        message = self._socket.recv(4096)
        if not message:
            raise RankError("the process that forks the ranks has died")
        return int(message)

    def close(self) -> None:
        self._socket.close()
        self._process.wait(10)


_running: list[_Zygote] = []


def _zygote() -> _Zygote:
    if not _running:
        _running.append(_Zygote())
    return _running[0]


# ---- in the zygote and the ranks ----


def _preload() -> None:
    import diffusers
    import torch

    from ditpar.family import families

    torch.set_num_threads(1)
    for family in families().values():
        for name in (family.transformer, *family.pipelines):
            getattr(diffusers, name)


def _serve_zygote(control: socket.socket) -> None:
    """Forks and reaps at the parent's word, until the parent closes the line."""
    _preload()
    statuses: dict[int, int] = {}
    while True:
        message, handles, _, _ = socket.recv_fds(control, 65536, 1)
        if not message:
            return
        order, value, log = pickle.loads(message)
        if order == "reap":
            if value not in statuses:
                statuses[value] = os.waitpid(value, 0)[1]
            control.sendall(str(statuses[value]).encode())
            continue
        pid = os.fork()
        if pid == 0:
            control.close()
            _serve_rank(value, Connection(handles[0]), log)
            os._exit(0)
        os.close(handles[0])
        control.sendall(str(pid).encode())


def _serve_rank(number: int, connection: Connection, log: str) -> None:
    """Runs cases until the parent closes the line. All that the rank prints goes to its log."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the zygote, even inside a hang
    file = open(log, "a", buffering=1)  # noqa: SIM115  (open for the rank's life)
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    faulthandler.enable(file=file)
    while True:
        try:
            case, payload = connection.recv_bytes(), connection.recv_bytes()
        except EOFError:
            return
        try:
            answer = pickle.dumps((True, _case(number, payload, *pickle.loads(case))))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(answer)


def _case(number: int, payload: bytes, module: str, file: str, name: str, size: int, store: str) -> Any:
    import torch.distributed as dist

    function: Any = _module(module, file)
    for part in name.split("."):
        function = getattr(function, part)
    args, kwargs = pickle.loads(payload)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=size)
    result = function(*args, **kwargs)
    dist.destroy_process_group()
    return result


def _module(name: str, file: str) -> Any:
    """A test file as the module that pytest made of it, or an installed module."""
    if name not in sys.modules:
        if TESTS not in Path(file).resolve().parents:
            return importlib.import_module(name)
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        if "." in name:  # pickle imports the folder's package too
            package = name.rpartition(".")[0]
            sys.modules.setdefault(package, types.ModuleType(package))
        sys.modules[name] = module  # first, so that pickle finds the module's classes while it loads
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


if __name__ == "__main__":
    _serve_zygote(socket.socket(fileno=int(sys.argv[1])))
