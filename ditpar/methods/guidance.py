"""CFG parallel for pipelines that call the transformer once a branch: both calls are deferred, then run side by side."""

from __future__ import annotations

import torch
from torch import Tensor

from ditpar.comm import Group
from ditpar.dataflow.deferred import Captured, Deferred
from ditpar.family import Family
from ditpar.methods.root import Arguments, Root, output_shape

METHOD = "cfg"


class Branches:
    """The calls of one pipeline that wait to run. Shared by its transformers.

    Attributes:
        pairs: times that two calls ran side by side.
        alone: calls that every rank ran by itself, since their result was used before a second call came.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.waiting: list[tuple[Captured, Root, Deferred]] = []
        self.pairs = 0
        self.alone = 0

    def defer(self, family: Family, transformer: torch.nn.Module, root: Root) -> Root:
        """Calls return a Deferred and wait for the other branch's call."""

        def wrapped(arguments: Arguments) -> Tensor:
            hidden: Tensor = arguments["hidden_states"]
            shape = output_shape(family, transformer, arguments)
            result: Deferred = Deferred(lambda: self._value(result), shape, hidden.dtype, hidden.device)
            self.waiting.append((Captured(arguments), root, result))
            return result

        return wrapped

    def _value(self, wanted: Deferred) -> Tensor:
        self.run()
        assert wanted._value is not None
        return wanted._value

    def run(self) -> None:
        """Runs all waiting calls, two at a time: rank i of the group runs the i-th of a pair."""
        waiting, self.waiting = self.waiting, []
        while waiting:
            if len(waiting) == 1:
                captured, root, result = waiting.pop()
                result._value = root(captured.get())
                self.alone += 1
                break
            pair, waiting = waiting[:2], waiting[2:]
            captured, root, mine = pair[self.group.index]
            value = root(captured.get()).contiguous()
            other = pair[1 - self.group.index][2]
            received = torch.empty(other.shape, dtype=value.dtype, device=value.device)
            self.group.exchange(METHOD, [value, value], [received, received])
            mine._value, other._value = value, received
            self.pairs += 1
