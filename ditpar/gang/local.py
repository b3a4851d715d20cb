"""A gang of local processes: forked by a fork server, watched while they work, and ended together when one fails."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import psutil

from ditpar.errors import GangError
from ditpar.gang import server
from ditpar.gang.calls import Answer, Command, Setup
from ditpar.gang.wire import Wire

GRACE_S = 3.0
"""How long the other ranks may take to fail alike after one has raised."""
POLL_S = 0.25
STOPPED_S = 2.0
"""How long a rank may be stopped (SIGSTOP, a debugger) before the gang is ended."""


class Gang(Protocol):
    """What a launcher offers. Local processes are one; torchrun and Ray are to be others."""

    def run(self, command: Setup | Command, on_callback: Callable[..., Any] | None = None) -> Any:
        """Has all ranks do the command; returns rank 0's answer."""
        ...

    def interrupt(self) -> None: ...

    def end(self) -> None: ...

    @property
    def alive(self) -> bool: ...


class _Member:
    def __init__(self, number: int, pid: int, wire: Wire, stacks: int) -> None:
        self.number, self.pid, self.wire, self.stacks = number, pid, wire, stacks
        self.answer: Answer | None = None
        self.steps = 0
        self.stopped_since: float | None = None

    def last_stacks(self) -> str:
        size = os.fstat(self.stacks).st_size
        return os.pread(self.stacks, size, 0).decode(errors="replace")


class LocalGang:
    """Ranks on this host.

    Args:
        world, threads: number of ranks, and threads of each.
        names: classes that the fork server imports beforehand.
        patience: seconds without a sign of life from any rank after which the gang is ended: until the first steps of
            a request are known, and the least later on, when it is 20 times the median step.
    """

    def __init__(
        self, world: int, threads: int, names: list[str], patience: tuple[float, float] = (600.0, 60.0)
    ) -> None:
        self.world, self.threads, self.names, self.patience = world, threads, names, patience
        self._server: server.ForkServer | None = None
        self._members: list[_Member] = []
        self._interrupt = threading.Event()

    @property
    def alive(self) -> bool:
        return bool(self._members)

    def start(self) -> None:
        """Forks the ranks; starts the fork server first if there is none."""
        if self._server is None or not self._server.alive:
            self._server = server.take()
            try:
                self._server.preload(self.names)
            except EOFError:
                self.close()
                raise GangError("the fork server ended while it imported torch and diffusers") from None
        for number in range(self.world):
            mine, theirs = socket.socketpair()
            stacks = os.memfd_create("stacks", os.MFD_CLOEXEC)
            with theirs:
                pid = self._server.fork(number, self.threads, [theirs.fileno(), stacks])
            self._members.append(_Member(number, pid, Wire(mine), stacks))

    def run(self, command: Setup | Command, on_callback: Callable[..., Any] | None = None) -> Any:
        """Has all ranks do the command; returns rank 0's answer.

        Raises what all ranks raised alike, after which the gang goes on. Raises GangError, after ending the gang, when
        ranks disagree, one dies or is stopped, or none gives a sign of life for too long. KeyboardInterrupt ends it too.
        """
        if not self.alive:
            if not isinstance(command, Setup):
                raise GangError("the gang has ended; set it up again first")
            self.start()
        self._interrupt.clear()
        for member in self._members:
            member.answer, member.steps = None, 0
            self._send(member, ("command", command))
        try:
            return self._watch(on_callback)
        except GangError:
            raise
        except BaseException:
            if any(member.answer is None for member in self._members):
                self.end()  # a callback of the caller's raised, or Ctrl-C: ranks are in the middle of something
            raise

    def interrupt(self) -> None:
        """Asks the running request to stop at its next step. Any thread may call it."""
        self._interrupt.set()

    def memory(self) -> list[dict[str, int]]:
        """Resident memory per rank, in bytes."""
        return [{"rank": m.number, "pid": m.pid, "rss": psutil.Process(m.pid).memory_info().rss} for m in self._members]

    def end(self) -> None:
        """Kills all ranks. The fork server stays, for a quick restart."""
        members, self._members = self._members, []
        for member in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGKILL)
        for member in members:
            self._reap(member)
            member.wire.close()
            os.close(member.stacks)

    def close(self) -> None:
        """Ends the ranks and the fork server."""
        self.end()
        if self._server is not None:
            self._server.close()
            self._server = None

    def _watch(self, on_callback: Callable[..., Any] | None) -> Any:
        first, least = self.patience
        step_times: list[float] = []
        last_sign = last_step = time.monotonic()
        failed_at: float | None = None
        while any(member.answer is None for member in self._members):
            waiting = {member.wire: member for member in self._members if member.answer is None}
            if self._interrupt.is_set():
                self._interrupt.clear()
                self._send(self._members[0], ("interrupt", None))
            ready, _, _ = select.select(list(waiting), [], [], POLL_S)
            now = time.monotonic()
            for wire in ready:
                member = waiting[wire]
                kind, value = self._receive(member)
                last_sign = now
                if kind == "answer":
                    member.answer = value
                    if value.error is not None:
                        failed_at = failed_at or now
                elif kind == "step":
                    member.steps = value
                    if member.number == 0:
                        step_times.append(now - last_step)
                        last_step = now
                elif kind == "port":
                    for other in self._members[1:]:
                        self._send(other, ("reply", value))
                elif kind == "callback":
                    assert on_callback is not None
                    self._send(member, ("reply", on_callback(*value)))
                    last_sign = last_step = time.monotonic()
            self._check_failures(failed_at, now)
            self._check_stopped(now)
            limit = max(least, 20 * statistics.median(step_times)) if len(step_times) > 2 else first
            if now - last_sign > limit:
                self._give_up(limit)
        answer = self._members[0].answer
        assert answer is not None
        if any(member.answer and member.answer.error for member in self._members):
            self._check_failures(0.0, now)
            assert answer.error is not None
            raise answer.error from GangError("raised alike on all ranks; on rank 0:", 0, answer.traceback)
        return answer.value

    def _check_failures(self, failed_at: float | None, now: float) -> None:
        """Ends the gang when ranks do not fail alike: those that did not raise may wait for ever for those that did."""
        if failed_at is None:
            return
        answers = [member.answer for member in self._members]
        errors = [a for a in answers if a is not None and a.error is not None]
        done = all(a is not None for a in answers)
        if not (done or now - failed_at > GRACE_S):
            return
        if done and len(errors) == self.world and all(a.alike(errors[0]) for a in errors):
            return
        member = next(m for m in self._members if m.answer is not None and m.answer.error is not None)
        assert member.answer is not None
        error, text = member.answer.error, member.answer.traceback
        self._fail(f"rank {member.number} raised {type(error).__name__}: {error}", member.number, text)

    def _check_stopped(self, now: float) -> None:
        for member in self._members:
            try:
                stopped = psutil.Process(member.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
            except psutil.NoSuchProcess:
                continue
            member.stopped_since = (member.stopped_since or now) if stopped else None
            if member.stopped_since is not None and now - member.stopped_since > STOPPED_S:
                self._fail(f"rank {member.number} (pid {member.pid}) is stopped", member.number, self._stacks())

    def _give_up(self, limit: float) -> None:
        behind = min(self._members, key=lambda m: (m.answer is not None, m.steps))
        alike = len({(m.answer is None, m.steps) for m in self._members}) == 1
        who = "no rank" if alike else f"rank {behind.number}, the furthest behind,"
        message = f"{who} gave a sign of life for {limit:.0f} s, at step {behind.steps}"
        self._fail(message, None if alike else behind.number, self._stacks())

    def _stacks(self) -> str:
        """All ranks' stacks, as far as they can still write them."""
        for member in self._members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGUSR1)
        time.sleep(0.3)
        return "\n".join(f"rank {m.number}:\n{m.last_stacks() or '(none)'}" for m in self._members)

    def _send(self, member: _Member, message: Any) -> None:
        try:
            member.wire.send(message)
        except OSError:
            self._died(member)

    def _receive(self, member: _Member) -> Any:
        try:
            return member.wire.receive()
        except EOFError:
            return self._died(member)

    def _died(self, member: _Member) -> None:
        how = self._reap(member)
        self._fail(f"rank {member.number} (pid {member.pid}) died: {how}", member.number, member.last_stacks())

    def _reap(self, member: _Member) -> str:
        """How the rank ended. It is killed first if only its wire is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(member.pid, signal.SIGKILL)
        if self._server is None:
            return "ended"
        try:
            return self._server.reap(member.pid)
        except EOFError:
            return "ended with the fork server"

    def _fail(self, message: str, rank: int | None, remote_traceback: str) -> None:
        self.end()
        raise GangError(f"{message}; the gang of {self.world} was ended", rank, remote_traceback)
