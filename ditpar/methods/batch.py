"""Batch split: the samples of one transformer call shared out among ranks (data, and both branches of batched CFG)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ditpar.comm import Group
from ditpar.dataflow.partition import split, start
from ditpar.family import Family
from ditpar.methods.root import Arguments, Root


def batch_split(family: Family, group: Group, method: str, root: Root, gathers: bool) -> Root:
    """Each rank of `group` runs its share of dim 0; every rank gets the whole output, if it `gathers` at all.

    A batch smaller than the group leaves ranks without samples: they compute the first one and its result is dropped.
    """

    def wrapped(arguments: Arguments) -> Tensor:
        batch = arguments["hidden_states"].shape[0]
        if batch == 1:
            return root(arguments)
        sizes = split(batch, group.size)
        own = sizes[group.index]
        first = start(sizes, group.index) if own else 0
        span = slice(first, first + max(own, 1))
        mine = {
            name: _cut(value, batch, span) if name in family.batched else value for name, value in arguments.items()
        }
        out = root(mine)[:own]
        return group.all_gather(method, out, sizes, 0) if gathers else out

    return wrapped


def _cut(value: Any, batch: int, span: slice) -> Any:
    if isinstance(value, Mapping):
        return {key: _cut(item, batch, span) for key, item in value.items()}
    if isinstance(value, Tensor):
        return value[span] if value.ndim and value.shape[0] == batch else value
    if isinstance(value, list | tuple) and len(value) == batch:
        return value[span]
    return value
