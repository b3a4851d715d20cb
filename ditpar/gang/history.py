"""What was done to a pipeline, so that it can be done again to a new one."""

from __future__ import annotations

from collections.abc import Iterator

from ditpar.gang.calls import Command

_CHANGES = (
    "add_",
    "compile",
    "delete_",
    "disable_",
    "enable_",
    "fuse_",
    "hotswap_",
    "load_",
    "register_",
    "set_",
    "unfuse_",
    "unload_",
    "unset_",
    "upcast_",
)
_SETS = ("set_", "enable_", "disable_")


def lasts(command: Command) -> bool:
    """Whether a command changes the pipeline for later ones. Methods are told by their names."""
    name = command.path[-1]
    return command.kind == "set" or (command.kind == "call" and (name.startswith(_CHANGES) or name == "to"))


class History:
    """Commands in order, without those that later ones have made void, so that a long life does not fill it."""

    def __init__(self) -> None:
        self._commands: list[Command] = []

    def add(self, command: Command) -> None:
        name = command.path[-1]
        if name == "unload_lora_weights" and not any("fuse" in c.path[-1] for c in self._commands):
            self._commands = [c for c in self._commands if not ("lora" in c.path[-1] or "adapter" in c.path[-1])]
            return
        last = self._commands[-1] if self._commands else None
        if last is not None and last.path == command.path and (command.kind == "set" or name.startswith(_SETS)):
            self._commands.pop()
        self._commands.append(command)

    def __iter__(self) -> Iterator[Command]:
        return iter(list(self._commands))

    def __len__(self) -> int:
        return len(self._commands)
