"""What a gang asks of whoever starts its ranks. Local processes are one launcher; torchrun and Ray are to be others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ditpar.gang.wire import Line


@dataclass
class Member:
    """A rank that was started: its number, its process, and the line to it."""

    number: int
    pid: int
    line: Line


class Launcher(Protocol):
    """Starts and ends the ranks of one gang."""

    world: int

    def start(self) -> list[Member]:
        """Starts all ranks. Raises GangError when that fails, with nothing left of them."""
        ...

    def condition(self, number: int) -> str:
        """What the rank's process does at the moment, in a word (`running`, `stopped`, ...); `ended` once it has gone."""
        ...

    def stacks(self) -> list[str]:
        """Each rank's stacks, as far as it still writes them."""
        ...

    def last_words(self, number: int) -> str:
        """What a rank has written by itself into its file of stacks: where a fault hit it."""
        ...

    def memory(self) -> list[dict[str, int]]:
        """Memory of each rank, in bytes."""
        ...

    def end(self) -> list[str]:
        """Kills all ranks and waits until they are gone; how each one ended, in words."""
        ...

    def close(self) -> None:
        """Ends the ranks and everything else that was started. May be called again, and from any thread."""
        ...
