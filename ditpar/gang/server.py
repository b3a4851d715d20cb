"""The fork server: a process that has imported the heavy libraries and forks ranks on request.

`python -m ditpar.gang.server FD` serves the Unix socket FD. It is a process of its own, so a caller's script needs
no `if __name__ == "__main__"`, and has threads of no one. Ranks die with it, and it ends when the caller's end closes.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import importlib
import os
import signal
import socket
import subprocess
import sys
from typing import Any

from ditpar.gang.wire import Wire

PR_SET_PDEATHSIG = 1


def main() -> None:
    sock = socket.socket(fileno=int(sys.argv[1]))
    control = Wire(sock)
    _preload([])
    children: set[int] = set()
    try:
        while True:
            kind, value = control.receive()
            if kind == "preload":
                _preload(value)
                control.send("ready")
            elif kind == "fork":
                pid = _fork(sock, *value)
                children.add(pid)
                control.send(pid)
            elif kind == "reap":
                children.discard(value)
                control.send(_reap(value))
    except EOFError:
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _preload(names: list[str]) -> None:
    """Imports what ranks will need. Names are `library.Class` of a model's components."""
    import torch  # noqa: F401

    import ditpar.engine.parallel  # noqa: F401

    for name in names:
        library, _, attribute = name.partition(".")
        with contextlib.suppress(ImportError, AttributeError):
            getattr(importlib.import_module(library), attribute)


def _fork(control: socket.socket, rank: int, threads: int) -> int:
    """Forks a rank. Its socket and its file for stacks follow the request as file descriptors."""
    fds = _receive_fds(control, 2)
    pid = os.fork()
    if pid:
        for fd in fds:
            os.close(fd)
        return pid
    status = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        control.close()
        from ditpar.gang.rank import serve

        serve(rank, threads, Wire(socket.socket(fileno=fds[0])), fds[1])
        status = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _receive_fds(control: socket.socket, count: int) -> list[int]:
    _, ancillary, _, _ = control.recvmsg(1, socket.CMSG_SPACE(count * array.array("i").itemsize))
    fds = array.array("i")
    for _, _, data in ancillary:
        fds.frombytes(data)
    return list(fds)


def _reap(pid: int) -> str:
    """How the rank ended, in words."""
    try:
        _, status = os.waitpid(pid, 0)
    except ChildProcessError:
        return "ended"
    code = os.waitstatus_to_exitcode(status)
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


class ForkServer:
    """The caller's end of a fork server. It starts at once, and imports while the caller does other things."""

    def __init__(self) -> None:
        mine, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ditpar.gang.server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is the caller's to handle
            )
        self.control = Wire(mine)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def preload(self, names: list[str]) -> None:
        """Waits until the server has imported the libraries and these classes. Raises EOFError when it has ended."""
        self._ask("preload", names)

    def fork(self, rank: int, threads: int, fds: list[int]) -> int:
        """Forks a rank that is given these file descriptors; its process number."""
        self.control.send(("fork", (rank, threads)))
        self.control.sock.sendmsg([b"f"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
        return int(self.control.receive())

    def reap(self, pid: int) -> str:
        """How a rank has ended, in words."""
        return str(self._ask("reap", pid))

    def close(self) -> None:
        self.control.close()
        try:
            self.process.wait(2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _ask(self, kind: str, value: Any) -> Any:
        try:
            self.control.send((kind, value))
        except OSError:
            raise EOFError from None
        return self.control.receive()


_spare: list[ForkServer] = []


def prestart() -> None:
    """Starts a fork server for whoever asks next. Cheap: it imports while the caller still does."""
    if not _spare:
        _spare.append(ForkServer())
        atexit.register(drop_spare)


def take() -> ForkServer:
    """The server started beforehand, or a new one."""
    return _spare.pop() if _spare else ForkServer()


def drop_spare() -> None:
    """Ends a server that nobody asked for."""
    while _spare:
        server = _spare.pop()
        server.process.kill()  # it has forked nothing, and in the midst of its imports it would hear nothing else
        server.close()


if __name__ == "__main__":
    main()
