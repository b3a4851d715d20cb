"""A gang: ranks that do what the caller says together, are watched meanwhile, and are ended together when one fails."""

from __future__ import annotations

import os
import select
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ditpar.errors import GangError, RequestError
from ditpar.gang.calls import Answer, Command, Event, Setup
from ditpar.gang.launcher import Launcher, Member
from ditpar.gang.wire import dumps, loads

GRACE_S = 3.0
"""How long the other ranks may take to fail alike after one has raised."""
SILENT_S = 3.0
"""Without a sign of life (one a second is sent) for so long, a rank's process is looked at; if stopped, the gang ends."""
DEAF_S = 60.0
"""Without a sign of life for so long, the gang ends whatever the process does."""
POLL_S = 0.2
_WAITS_IN = ("distributed_c10d.py", os.path.join("ditpar", "shared.py"))
"""Files that a rank which waits for others has in its stack."""


@dataclass(frozen=True)
class Listener:
    """What the caller does when ranks tell something: run a callback, draw the bar (total, steps, end)."""

    callback: Callable[[Event], Any]
    bar: Callable[[str, Any], None]


class _Clock:
    """When ranks have to be given up: from how long the steps of this request took."""

    def __init__(self, patience: tuple[float, float]) -> None:
        self.first, self.least = patience
        self.times: list[float] = []
        self.total: int | None = None
        self.steps = 0
        self.last = time.monotonic()

    def step(self, steps: int) -> None:
        now = time.monotonic()
        self.times.append(now - self.last)
        self.steps, self.last = steps, now

    def rest(self) -> None:
        """Time that was the caller's own does not count."""
        self.last = time.monotonic()

    @property
    def limit(self) -> float:
        """Seconds that the next step may take; what comes before the first and after the last may take longest."""
        begun = len(self.times) > 2 and (self.total is None or self.steps < self.total)
        return max(self.least, 20 * statistics.median(self.times)) if begun else self.first


class Gang:
    """Ranks under watch.

    Args:
        launcher: starts and ends them.
        patience: seconds without a step after which the gang is ended: while steps are not known (before the third,
            after the last, in other commands), and the least in between, where it is 20 times the median step.
    """

    def __init__(self, launcher: Launcher, patience: tuple[float, float] = (600.0, 60.0)) -> None:
        self.launcher, self.patience = launcher, patience
        self._members: list[Member] = []
        self._steps: dict[int, int] = {}
        self._interrupt = threading.Event()
        self._process = os.getpid()
        self._clock = _Clock(patience)

    @property
    def alive(self) -> bool:
        return bool(self._members)

    def ailing(self) -> str:
        """What is wrong with idle ranks, for which the gang has to be started anew; empty when all is well."""
        self._check_process()
        for member in self._members:
            try:
                member.line.arrived()
            except EOFError:
                return f"rank {member.number} (pid {member.pid}) has ended"
            condition = self.launcher.condition(member.number)
            if condition in ("stopped", "ended"):
                return f"rank {member.number} (pid {member.pid}) is {condition}"
        return ""

    def start(self, setup: Setup) -> Any:
        """Starts the ranks and binds the plan; rank 0's answer."""
        self._check_process()
        self._members = self.launcher.start()
        return self.run(setup)

    def run(self, command: Setup | Command, listener: Listener | None = None) -> Any:
        """Has all ranks do the command; returns rank 0's answer.

        Raises what all ranks raised alike, or the rank that alone had to do it; the gang goes on. Raises GangError, after
        ending the gang, when ranks disagree, one dies or is stopped, or steps take too long. Anything else raised
        meanwhile, as KeyboardInterrupt, ends the gang too.
        """
        self._check_process()
        if not self.alive:
            raise GangError("the gang has ended")
        data = _encoded(command)
        self._interrupt.clear()
        self._clock = _Clock(self.patience)
        self._steps = {}
        try:
            answers = self._collect(b"c", data, b"a", listener)
        except BaseException:
            self.end()
            raise
        return self._agreed(answers, command)

    def run_within(self, command: Command) -> Any:
        """The same while a callback of the caller's runs, whose ranks are waiting for its reply."""
        return self._agreed(self._collect(b"q", _encoded(command), b"n", None), command)

    def interrupt(self) -> None:
        """Asks the running request to stop at its next step. Any thread may call it."""
        self._interrupt.set()

    def end(self) -> list[str]:
        """Kills all ranks; how each one ended."""
        self._members = []
        return self.launcher.end()

    def close(self) -> None:
        if os.getpid() == self._process:
            self._members = []
            self.launcher.close()

    def _collect(self, kind: bytes, data: bytes, answer: bytes, listener: Listener | None) -> list[Answer]:
        """Sends a message to all ranks and takes what they say until all have answered."""
        for member in self._members:
            member.line.post(kind, data)
        answers: dict[int, Answer] = {}
        failed_at: float | None = None
        signs = dict.fromkeys(range(len(self._members)), time.monotonic())
        while len(answers) < len(self._members):
            for member, said, value in self._heard(signs):
                if said == answer:
                    answers[member.number] = value
                    if value.error is not None:
                        failed_at = failed_at or time.monotonic()
                elif said == b"p":
                    for other in self._members[1:]:
                        other.line.post(b"r", dumps(value))
                elif listener is not None:
                    self._told(said, value, listener, signs)
                elif said == b"a":  # in the middle of a callback: this rank never got there
                    self._disagree({member.number: value})
            if failed_at is not None and time.monotonic() - failed_at > GRACE_S:
                self._disagree(answers)
            self._check_signs(signs, answers)
            if time.monotonic() - self._clock.last > self._clock.limit:
                self._give_up()
        return [answers[member.number] for member in self._members]

    def _heard(self, signs: dict[int, float]) -> Iterator[tuple[Member, bytes, Any]]:
        """Sends and receives what can be, for at most POLL_S."""
        before = time.monotonic()
        if self._interrupt.is_set():
            self._interrupt.clear()
            self._members[0].line.post(b"i")
        by_line = {member.line: member for member in self._members}
        ready, writable, _ = select.select(by_line, [line for line in by_line if line.pending], [], POLL_S)
        if time.monotonic() - before > POLL_S + 1:  # this process was itself stopped, or the machine asleep
            signs.update(dict.fromkeys(signs, time.monotonic()))
            self._clock.rest()
        for line in writable:
            line.flush()
        for line in ready:
            member = by_line[line]
            try:
                messages = line.arrived()
            except EOFError:
                self._died(member)
            signs[member.number] = time.monotonic()
            for said, data in messages:
                if said == b"b":
                    self._steps[member.number] = loads(data)
                else:
                    yield member, said, loads(data)

    def _told(self, said: bytes, value: Any, listener: Listener, signs: dict[int, float]) -> None:
        if said == b"e":
            reply = dumps(listener.callback(value))
            for member in self._members:
                member.line.post(b"r", reply)
            signs.update(dict.fromkeys(signs, time.monotonic()))
            self._clock.rest()
        elif said == b"t":
            self._clock.total = value
            listener.bar("total", value)
        elif said == b"s":
            self._clock.step(value)
            self._steps[0] = value
            listener.bar("steps", value)
        else:
            listener.bar("end", None)

    def _agreed(self, answers: list[Answer], command: Setup | Command) -> Any:
        errors = [answer for answer in answers if answer.error is not None]
        if not errors:
            if not answers[0].sendable:
                raise RequestError(f"{_name(command)} gives what cannot leave the ranks: {answers[0].value}")
            return answers[0].value
        alone = isinstance(command, Command) and command.only_rank is not None
        if not alone and not (len(errors) == len(answers) and all(a.alike(errors[0]) for a in errors)):
            self._disagree(dict(enumerate(answers)))
        error = errors[0].error
        assert error is not None
        raise error from GangError("raised alike on all ranks; on the first:", None, errors[0].traceback)

    def _disagree(self, answers: dict[int, Answer]) -> None:
        """Ranks did not fail alike: those that did not raise may wait for ever for those that did."""
        number, answer = min(answers.items(), key=lambda item: (item[1].error is None, item[0]))
        self._fail(f"rank {number} raised {type(answer.error).__name__}: {answer.error}", number, answer.traceback)

    def _check_signs(self, signs: dict[int, float], answers: dict[int, Answer]) -> None:
        for number, last in signs.items():
            silent = time.monotonic() - last
            if number in answers or silent < SILENT_S:
                continue
            condition = self.launcher.condition(number)
            if condition == "stopped" or silent > DEAF_S:
                what = f"rank {number} (pid {self._members[number].pid}) has not answered for {silent:.0f} s; it is {condition}"
                self._fail(what, number, self._all_stacks())

    def _give_up(self) -> None:
        """No step for too long. The rank that is not waiting for others in a collective is the one at fault."""
        stacks = self.launcher.stacks()
        working = [
            number for number, text in enumerate(stacks) if text and not any(f in _main_thread(text) for f in _WAITS_IN)
        ]
        rank = working[0] if len(working) == 1 and len(stacks) > 1 else None
        who = "the ranks have" if rank is None else f"rank {rank}, for which the others wait, has"
        limit, steps = self._clock.limit, self._steps.get(0, 0)
        self._fail(f"{who} not finished a step for {limit:.0f} s, after step {steps}", rank, _joined(stacks))

    def _all_stacks(self) -> str:
        return _joined(self.launcher.stacks())

    def _died(self, member: Member) -> None:
        words = self.launcher.last_words(member.number)
        self._members = []
        how = self.launcher.end()[member.number]
        raise GangError(
            f"rank {member.number} (pid {member.pid}) died: {how}; the gang was ended", member.number, words
        )

    def _fail(self, message: str, rank: int | None, remote_traceback: str) -> None:
        self.end()
        raise GangError(f"{message}; the gang was ended", rank, remote_traceback)

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise GangError(f"the pipeline belongs to process {self._process}; call ditpar.load in this one")


def _encoded(command: Setup | Command) -> bytes:
    try:
        return dumps(command)
    except Exception as error:  # objects that do not pickle can fail in any way
        raise RequestError(f"{_name(command)}: an argument cannot be sent to the ranks: {error}") from error


def _name(command: Setup | Command) -> str:
    return "pipe." + ".".join(command.path) if isinstance(command, Command) else "setup"


def _main_thread(stacks: str) -> str:
    """The part of faulthandler's text that is the main thread's: it comes last."""
    return stacks.rsplit("hread 0x", 1)[-1]


def _joined(stacks: list[str]) -> str:
    return "\n".join(f"rank {number}:\n{text or '(none)'}" for number, text in enumerate(stacks))
