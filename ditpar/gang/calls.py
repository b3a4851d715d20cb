"""What travels between caller and ranks: commands, answers, and stand-ins for what cannot be pickled."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Setup:
    """How a rank comes to its pipeline. `timeout` is that of the process group, in seconds."""

    path: str
    plan: str
    world: int
    device: str
    options: dict[str, Any]
    timeout: float
    quiet: bool


@dataclass(frozen=True)
class Command:
    """One thing to do on the pipeline (or below it, by `path`), on all ranks or on one.

    Attributes:
        kind: `call`, `get` or `set`.
        folder: the caller's working directory, for relative paths.
        plan: to bind first if another one is bound.
    """

    kind: str
    path: tuple[str, ...]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    folder: str = "."
    only_rank: int | None = None
    plan: str | None = None


@dataclass(frozen=True)
class Answer:
    """What came of a command."""

    value: Any = None
    error: Exception | None = None
    traceback: str = ""

    def alike(self, other: Answer) -> bool:
        """Whether both ranks failed in the same way, so that neither waits for the other."""
        return type(self.error) is type(other.error) and str(self.error) == str(other.error)


class Marker(enum.Enum):
    """Stands for what stays where it is."""

    SELF = "the pipeline itself"
    CALLBACK = "a function of the caller's"
    MODULE = "a module in the ranks"
    METHOD = "a method in the ranks"


@dataclass(frozen=True)
class States:
    """Random states: of the generators of a call, or of the default one when `kind` is `default`."""

    kind: str  # default, one, many
    states: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, generator: Any) -> States:
        if generator is None:
            return cls("default", (torch.get_rng_state(),))
        if isinstance(generator, torch.Generator):
            return cls("one", (generator.get_state(),))
        return cls("many", tuple(g.get_state() for g in generator))

    def restore(self) -> Any:
        """The `generator` argument that these states came from, as new objects; sets the default state."""
        if self.kind == "default":
            torch.set_rng_state(self.states[0])
            return None
        made = [torch.Generator() for _ in self.states]
        for generator, state in zip(made, self.states, strict=True):
            generator.set_state(state)
        return made[0] if self.kind == "one" else made

    def hand_back(self, generator: Any) -> None:
        """Sets the caller's own generators to these states."""
        if self.kind == "default":
            torch.set_rng_state(self.states[0])
            return
        for g, state in zip([generator] if self.kind == "one" else generator, self.states, strict=True):
            g.set_state(state)
