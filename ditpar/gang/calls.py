"""What travels between caller and ranks: commands, answers, and stand-ins for what stays where it is."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ditpar.errors import RequestError


@dataclass(frozen=True)
class Loading:
    """How the host of a gang loads its pipeline: arguments of `from_pretrained`, and what to show meanwhile."""

    path: str
    options: dict[str, Any]
    show_bars: bool = True
    each_rank: bool = False
    """Whether each rank loads for itself, for loaders that use the device."""


@dataclass(frozen=True)
class Setup:
    """How the ranks join into a world and bind their pipeline."""

    plan: str
    world: int
    device: str
    threads: int
    traces: bool = False


@dataclass(frozen=True)
class Command:
    """One thing to do on the pipeline, or below it at `path`, on all ranks or on one.

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
    """What came of a command. `sendable` is False for a value that cannot leave the rank; `value` then says what it is."""

    value: Any = None
    error: Exception | None = None
    traceback: str = ""
    sendable: bool = True

    def alike(self, other: Answer) -> bool:
        """Whether both ranks failed in the same way, so that neither waits for the other."""
        return type(self.error) is type(other.error) and str(self.error) == str(other.error)


@dataclass(frozen=True)
class Event:
    """A callback of the caller's is due.

    Attributes:
        with_pipe: whether the pipeline comes before the other arguments.
        states, facts: what the callback may look at on the way.
    """

    name: str
    with_pipe: bool
    args: tuple[Any, ...]
    states: States
    facts: dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """What came of a callback.

    Attributes:
        result: what it returned; True in `raised` when it raised instead, which the caller then raises itself.
        edits: tensor arguments that it changed in place, by name (or position).
        settings: attributes that it set on the pipeline.
        states: random states after it.
    """

    result: Any
    edits: dict[Any, torch.Tensor]
    settings: dict[str, Any]
    states: States
    raised: bool = False


class CallbackRaised(Exception):  # never shown: the caller raises what its callback raised
    """Unwinds a request in the ranks after the caller's callback raised."""


class Marker(enum.Enum):
    """Stands for what stays where it is."""

    SELF = "the pipeline itself"
    CALLBACK = "a function of the caller's"
    MODULE = "a module in the ranks"
    METHOD = "a method in the ranks"


@dataclass(frozen=True)
class States:
    """Random states: of the CPU's default generator, of the CUDA one where ranks use CUDA, and of those passed."""

    default: torch.Tensor
    cuda: torch.Tensor | None
    given: tuple[tuple[str, torch.Tensor], ...]  # device type and state of each
    many: bool

    @classmethod
    def of(cls, generator: Any, device: str) -> States:
        """The states for a call's `generator` argument: None, a generator, or a sequence of them."""
        many = isinstance(generator, list | tuple)
        given = tuple((g.device.type, g.get_state()) for g in _listed(generator))
        cuda = torch.cuda.get_rng_state() if device == "cuda" and not given else None
        return cls(torch.get_rng_state(), cuda, given, many)

    def generators(self) -> Any:
        """New objects in the place of the `generator` argument that these states came from."""
        made = [torch.Generator(device) for device, _ in self.given]
        return made if self.many else made[0] if made else None

    def set(self, generator: Any) -> None:
        """Sets the default generators, and the passed ones, to these states."""
        torch.set_rng_state(self.default)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)
        for g, (_, state) in zip(_listed(generator), self.given, strict=True):
            g.set_state(state)


def _listed(generator: Any) -> list[torch.Generator]:
    if generator is None:
        return []
    return list(generator) if isinstance(generator, list | tuple) else [generator]


def generators(given: Any) -> Any:
    """A call's `generator` argument; whole numbers in it become generators seeded with them."""
    if isinstance(given, list | tuple):
        return [generators(each) for each in given]
    if isinstance(given, int) and not isinstance(given, bool):
        return torch.Generator().manual_seed(given)
    if given is not None and not isinstance(given, torch.Generator):
        raise RequestError(f"generator={given!r} must be a torch.Generator, a seed, or a list of these")
    return given


def facts(pipe: Any) -> dict[str, Any]:
    """The pipeline's plain attributes, which the caller answers itself without asking the ranks."""
    found = {name: value for name, value in vars(pipe).items() if _is_plain(value)}
    return found | {"device": pipe.device, "dtype": pipe.dtype}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return len(value) <= 64 and all(_is_plain(v) for v in value)
    if isinstance(value, Mapping):
        return type(value).__module__ == "builtins" and len(value) <= 64 and all(_is_plain(v) for v in value.values())
    if isinstance(value, torch.Tensor):
        return value.numel() <= 64
    return value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device)
