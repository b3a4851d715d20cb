"""The fork server: a process that has imported the heavy libraries and forks ranks on request.

`python -m ditpar.gang.server FD NAME...` serves the Unix socket FD. It is a process of its own, so a caller's script needs
no `if __name__ == "__main__"`, and has threads of no one. Ranks die with it, and it ends when the caller's end closes.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import importlib
import os
import signal
import socket
import sys
from typing import Any

from ditpar.gang.wire import Wire

PR_SET_PDEATHSIG = 1


def main() -> None:
    sock = socket.socket(fileno=int(sys.argv[1]))
    _preload(sys.argv[2:])
    control = Wire(sock)
    control.send("ready")
    children: set[int] = set()
    try:
        while True:
            kind, value = control.receive()
            if kind == "fork":
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


def start(names: list[str]) -> tuple[Any, Wire]:
    """Starts a fork server. Returns its process and the control wire; it says `ready` when it has imported all."""
    import subprocess

    mine, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "ditpar.gang.server", str(theirs.fileno()), *names],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is the caller's to handle
        )
    return process, Wire(mine)


if __name__ == "__main__":
    main()
