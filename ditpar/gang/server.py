"""The fork server: a process that has imported the heavy libraries once and forks the processes of gangs on request.

It is a process of its own, so that a caller's script needs no `if __name__ == "__main__"` and no thread of the caller's is
forked. It forks one *host* per gang, which loads the pipeline once; the host forks the ranks, which share the host's
weights until they write to them. Each process dies with its parent, and the server ends with the caller.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

from ditpar.errors import GangError
from ditpar.gang.wire import Wire, dumps, loads

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_POLL_S = 0.5
_REAP_S = 5.0
_END_S = 10.0
"""How long a fork server or host may take to end processes, before it is ended itself."""
STACKS_SIGNAL = signal.SIGUSR1
"""On which a rank writes its stacks."""
_BOOT = "import sys; sys.path[:] = sys.argv.pop(1).split('\\n'); from ditpar.gang.server import main; main()"


def main() -> None:
    """Entry point of the fork server's process: its argument is the number of the socket's descriptor."""
    os.dup2(2, 1)  # standard output is the caller's alone
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # to ask for CUDA must not begin it before a fork
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # ranks whose host was killed are reaped here, not left to init
    control = Wire(socket.socket(fileno=int(sys.argv[1])))
    _import(())
    serve(control, _host)
    os._exit(0)  # at once: what was frozen for the children would only be taken for leaks


def serve(control: Wire, life: Callable[[bytes, list[int]], None]) -> None:
    """Forks children that live `life(data, fds)`, and ends them, as the wire says; then ends all of them.

    Messages: `i` names to import, without an answer; `f` data and descriptors -> the child's pid; `e` pids -> how each of
    them ended, in words.
    """
    parent = os.getppid()
    children = _Children()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        # A copy of the caller's end may live on in a process that the caller forked: watch the caller itself, too.
        while os.getppid() == parent:
            children.reap()
            if not select.select([control], [], [], _POLL_S)[0]:
                continue
            kind, data, fds = control.receive()
            if kind == b"i":
                _import(loads(data))
            elif kind == b"f":
                gc.freeze()  # a collection would write to every page that is shared with the children
                pid = _fork(control, life, data, fds)
                children.running.add(pid)
                control.send(b"p", dumps(pid))
            else:
                control.send(b"e", dumps(children.end(loads(data))))
    children.end(children.running)
    children.reap_orphans()


class _Children:
    """The processes that this one has to bury: its own, and orphans of theirs."""

    def __init__(self) -> None:
        self.running: set[int] = set()
        self.ended: dict[int, str] = {}

    def end(self, pids: Collection[int]) -> dict[int, str]:
        """Kills children with their process groups, and waits; how each of them ended."""
        for pid in self.running.intersection(pids):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)  # also before it could become the leader of its group
                os.killpg(pid, signal.SIGKILL)
        while self.running.intersection(pids):
            self._buried(*os.waitpid(-1, 0))
        return {pid: self.ended.pop(pid, "ended") for pid in pids}

    def reap(self) -> None:
        """Buries those that have ended by themselves."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                self._buried(*ended)

    def reap_orphans(self) -> None:
        """Waits for the last ones, which die when their parents do."""
        end = time.monotonic() + _REAP_S
        with contextlib.suppress(ChildProcessError):
            while time.monotonic() < end:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    time.sleep(0.02)

    def _buried(self, pid: int, status: int) -> None:
        if pid in self.running:
            self.running.discard(pid)
            code = os.waitstatus_to_exitcode(status)
            self.ended[pid] = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def _fork(control: Wire, life: Callable[[bytes, list[int]], None], data: bytes, fds: list[int]) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        for fd in fds:
            os.close(fd)
        return pid
    status = 1
    try:
        os.setsid()  # a group of its own, which is ended as a whole
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:  # else the parent went before the line above
            control.close()
            life(data, fds)
            status = 0
    except BaseException:  # noqa: BLE001  nothing may run on in the copy of the parent's stack
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(status)


def _host(data: bytes, fds: list[int]) -> None:
    """The life of a gang's host: loads the pipeline, says how that went, then forks ranks that begin with it."""
    import torch

    from ditpar.gang import rank
    from ditpar.gang.calls import Answer

    wire = Wire(socket.socket(fileno=fds[0]))
    torch.set_num_threads(1)  # no thread pool may exist when ranks are forked
    pipe: Any = None
    try:
        loading = loads(data)
        load = rank.loader(loading)
        if not loading.each_rank:
            pipe = load()
        answer = Answer()
    except Exception as error:  # noqa: BLE001  the caller's to see
        answer = Answer(error=rank.portable(error), traceback=traceback.format_exc())
    wire.send(b"a", dumps(answer))
    if answer.error is None:
        gc.collect()

        def life(data: bytes, fds: list[int]) -> None:
            line = Wire(socket.socket(fileno=fds[0]))
            rank.serve(loads(data), line, fds[1], pipe if pipe is not None else load)

        serve(wire, life)


def _import(names: Sequence[str]) -> None:
    """Imports what ranks will need."""
    import torch  # noqa: F401

    import ditpar.engine.parallel
    import ditpar.gang.rank  # noqa: F401

    for name in names:
        library, _, attribute = name.partition(".")
        with contextlib.suppress(ImportError, AttributeError):
            getattr(importlib.import_module(library), attribute)


def _prctl(option: int, value: int) -> None:
    """Linux only; elsewhere the ends of sockets are what processes watch."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def _start() -> tuple[subprocess.Popen[bytes], Wire]:
    """Starts a fork server. It answers in order, so that the first answer comes when its imports are done."""
    mine, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, "\n".join(sys.path), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is the caller's to handle
        )
    return process, Wire(mine)


def asked(wire: Wire, pids: list[int]) -> dict[int, str] | None:
    """Has a fork server or host end its children; how each one ended. None when it does not answer."""
    try:
        wire.send(b"e", dumps(pids))
        if not select.select([wire], [], [], _END_S)[0]:
            return None
        return dict(loads(wire.receive()[1]))
    except (EOFError, OSError):
        return None
    except BaseException:
        wire.close()  # Ctrl-C: its answer would be taken for the next one
        raise


class ForkServer:
    """The caller's end: this process' fork server, shared by all its gangs. It runs while any of them is open."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        self._running: tuple[subprocess.Popen[bytes], Wire] | None = None
        self._ready = False

    @property
    def pid(self) -> int | None:
        return self._running[0].pid if self._running else None

    def started(self, user: Any = None, names: Sequence[str] = ()) -> Wire:
        """The wire to the server, which is started if there is none. It imports `names` meanwhile (`library.Class`)."""
        with self.lock:
            if self._running is None or self._running[0].poll() is not None:
                self.stop()
                self._running = _start()
            wire = self._running[1]
            if user is not None:
                self.users.add(user)
            if names:
                with contextlib.suppress(OSError):  # an end that has gone shows at the next answer
                    wire.send(b"i", dumps(tuple(names)))
            return wire

    def fork_host(self, user: Any, data: bytes, fd: int) -> int:
        """Forks a host that begins with `data` and this end of its wire; its pid. Starts the server if there is none."""
        with self.lock:
            wire = self.started(user)
            try:
                wire.send(b"f", data, [fd])
                pid = int(loads(wire.receive()[1]))
            except (EOFError, OSError):
                self.stop()
                raise GangError("the fork server has ended; did it import torch, diffusers and transformers?") from None
            except BaseException:
                self.stop()  # Ctrl-C: its answer would be taken for the next one
                raise
            self._ready = True
            return pid

    def end_host(self, pid: int) -> None:
        with self.lock:
            if self._running is not None and asked(self._running[1], [pid]) is None:
                self.stop()

    def leave(self, user: Any) -> None:
        """Ends the server with its last user."""
        with self.lock:
            self.users.discard(user)
            if not self.users:
                self.stop()

    def stop(self) -> None:
        with self.lock:
            if self._running is None:
                return
            (process, wire), ready = self._running, self._ready
            self._running, self._ready = None, False
            wire.close()
            if ready:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_END_S)
            process.kill()  # at once while it still imports, for it has no children yet
            process.wait()

    def forget(self) -> None:
        """In a process that this one forked: its copies of the descriptors go, and the processes are not its own."""
        for user in list(self.users):
            user.forget()
        if self._running is not None:
            self._running[1].close()
        self.__init__()  # type: ignore[misc]


SHARED = ForkServer()
os.register_at_fork(after_in_child=SHARED.forget)


def prestart() -> None:
    """Starts the fork server before anything is known of what it is for, to import while the caller does, too."""
    SHARED.started()
    atexit.register(drop_spare)


def drop_spare() -> None:
    """Ends a fork server that no gang has come to use."""
    with SHARED.lock:
        if not SHARED.users:
            SHARED.stop()
