"""The launcher of local ranks: a fork server for this process, and a host with the pipeline for each gang."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
import time
from typing import Any

import psutil

from ditpar.errors import GangError, ModelError
from ditpar.gang.calls import Answer, Loading
from ditpar.gang.launcher import Member
from ditpar.gang.server import SHARED, STACKS_SIGNAL, asked
from ditpar.gang.wire import Line, Wire, dumps, loads


class LocalLauncher:
    """Ranks on this host.

    Args:
        world: number of ranks.
        names: `library.Class` of what the fork server imports beforehand.
        loading: how the pipeline is loaded.
    """

    def __init__(self, world: int, names: list[str], loading: Loading) -> None:
        self.world, self.names, self.loading = world, names, loading
        self._host: tuple[int, Wire] | None = None
        self._members: list[Member] = []
        self._stacks: list[Any] = []
        self._lock = threading.RLock()
        self._closed = False

    def warm_up(self) -> None:
        """Starts the fork server, so that it imports while the caller does something else."""
        SHARED.started(self, self.names)

    @property
    def pids(self) -> list[int]:
        """Every process that was started for this gang: fork server, host, ranks."""
        server_pid = [SHARED.pid] if SHARED.pid else []
        return [*server_pid, *([self._host[0]] if self._host else []), *(m.pid for m in self._members)]

    def start(self) -> list[Member]:
        """Forks the ranks. The first time, or after the host has gone, loads the pipeline.

        Raises ModelError when it cannot be loaded, GangError when a process of the fork server's ended.
        """
        with self._lock:
            if self._closed:
                raise GangError("the gang is closed")
            try:
                wire = self._host[1] if self._host else self._start_host()
                for number in range(self.world):
                    self._members.append(self._fork(wire, number))
            except (EOFError, OSError):
                self._drop_host()
                raise GangError("the process that loads the pipeline has ended; was there enough memory?") from None
            except BaseException:
                self._drop_host()  # also on Ctrl-C: an answer would be taken for the next one
                raise
            return list(self._members)

    def _start_host(self) -> Wire:
        mine, theirs = socket.socketpair()
        wire = Wire(mine)
        with theirs:
            try:
                self.warm_up()
                pid = SHARED.fork_host(self, dumps(self.loading), theirs.fileno())
            except BaseException:
                wire.close()
                raise
        self._host = pid, wire
        answer: Answer = loads(wire.receive()[1])
        if answer.error is not None:
            cause = GangError("in the process that loads the pipeline:", None, answer.traceback)
            raise ModelError(f"model: {self.loading.path} could not be loaded: {answer.error}") from cause
        return wire

    def _fork(self, wire: Wire, number: int) -> Member:
        mine, theirs = socket.socketpair()
        stacks = tempfile.TemporaryFile()  # noqa: SIM115  nameless, and closed when the rank is ended
        self._stacks.append(stacks)
        line = Line(mine)
        with theirs:
            try:
                wire.send(b"f", dumps(number), [theirs.fileno(), stacks.fileno()])
                return Member(number, loads(wire.receive()[1]), line)
            except BaseException:
                line.close()
                raise

    def condition(self, number: int) -> str:
        """The state of the rank's process as the system has it."""
        try:
            state = str(psutil.Process(self._members[number].pid).status())
        except psutil.NoSuchProcess:
            return "ended"
        return {"zombie": "ended", "dead": "ended", "tracing-stop": "stopped"}.get(state, state)

    def stacks(self) -> list[str]:
        """Each rank's stacks. A stopped rank writes none."""
        for member in self._members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.pid, STACKS_SIGNAL)
        time.sleep(0.3)
        return [self.last_words(number) for number in range(self.world)]

    def last_words(self, number: int) -> str:
        """What a rank has written by itself into its file of stacks: where a fault hit it."""
        fd = self._stacks[number].fileno()
        return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")

    def memory(self) -> list[dict[str, int]]:
        """Per rank: `rss`, resident bytes, shared ones included; `pss`, with shared ones split among those who share."""
        return [
            {"rank": m.number, "pid": m.pid, "rss": info.rss, "pss": getattr(info, "pss", info.rss)}
            for m in self._members
            for info in [psutil.Process(m.pid).memory_full_info()]
        ]

    def end(self) -> list[str]:
        """Kills all ranks. The host stays, for a quick restart."""
        with self._lock:
            ends = asked(self._host[1], [m.pid for m in self._members]) if self._members and self._host else {}
            how = [(ends or {}).get(m.pid, "ended with its host") for m in self._members]
            if ends is None:
                self._drop_host()
            self._clear()
            return how

    def close(self) -> None:
        """Ends ranks and host, and the fork server with the last gang of this process."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._drop_host()
                SHARED.leave(self)

    def forget(self) -> None:
        """In a process that the caller forked: closes the copies of what is the caller's."""
        self._lock = threading.RLock()
        self._closed = True
        if self._host is not None:
            self._host[1].close()
            self._host = None
        self._clear()

    def _drop_host(self) -> None:
        """Ends the host, if any, and the ranks, which die with it."""
        if self._host is not None:
            (pid, wire), self._host = self._host, None
            ranks = [m.pid for m in self._members]
            if ranks:
                asked(wire, ranks)
            wire.close()
            SHARED.end_host(pid)
        self._clear()

    def _clear(self) -> None:
        for member in self._members:
            member.line.close()
        for file in self._stacks:
            file.close()
        self._members, self._stacks = [], []
