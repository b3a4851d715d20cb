"""Deferred tensors: the results of transformer calls that have not run yet, and what stock code computed from them.

A Deferred has shape, dtype and device and no data. Row-local operations on it (rules.py) are noted, to be done band by
band once the call has run; any other operation first runs what is pending and goes on with plain tensors. So stock code
is always right, and its steps overlap where it is row-local.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ditpar.dataflow.node import Evaluate, Node, NotReady, unchanging, version
from ditpar.errors import StaleError

if TYPE_CHECKING:
    from ditpar.dataflow.flow import Flow

__all__ = ["Captured", "Deferred", "Evaluate", "NotReady", "resolve"]


class Deferred(torch.Tensor):
    """A tensor that stands for a node; a write to it in place may make it stand for another."""

    _node: Node
    _call: Node

    @staticmethod
    def __new__(cls, node: Node) -> Deferred:
        meta = node.meta
        self: Deferred = torch.Tensor._make_wrapper_subclass(
            cls, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=node.device
        )
        self._node = self._call = node
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @property
    def row(self) -> int:
        """The dim whose entries are independent of each other."""
        return self._node.row

    @property
    def rows(self) -> int:
        return self._node.rows

    @property
    def pending(self) -> bool:
        """Whether there is no whole value yet."""
        return self._node.pending

    def fill(self, lo: int, hi: int, rows: Tensor) -> None:
        """States rows [lo, hi) of the call's result, whatever was written to it since. The tensor is given away."""
        self._call.fill(lo, hi, rows)

    def band(self, lo: int, hi: int) -> Tensor:
        """Rows [lo, hi) on the rank that owns the value. Raises NotReady when the call has not got so far."""
        return self._node.band(lo, hi)

    def value(self) -> Tensor:
        """The plain tensor. Runs the pending work if need be; every rank of the request must then ask for it."""
        return self._node.value()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.einsum:
            return _flow(args).einsum(*args)
        known = tree_map_only(Deferred, lambda d: d if d.pending else d.value(), (args, kwargs))
        if not any(isinstance(leaf, Deferred) for leaf in tree_leaves(known)):
            if _writes(func, kwargs):
                _flow((args, kwargs)).before_write(func.__name__)
            return func(*known[0], **known[1])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _flow((args, kwargs)).dispatch(func, args, kwargs or {})

    # What reads memory without an operation has no dispatch to catch it.
    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        return self._read("numpy").numpy(*args, **kwargs)

    def tolist(self) -> Any:
        return self._read("tolist").tolist()

    def data_ptr(self) -> int:
        return self._read("data_ptr").data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self._read("untyped_storage").untyped_storage()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self._read("__array__").__array__(*args, **kwargs)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self._read("__dlpack__").__dlpack__(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._read("pickle").__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self._read("deepcopy").clone()

    def _read(self, how: str) -> Tensor:
        if self.pending:
            self._node.flow.count(how)
        return self.value()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Deferred(shape={list(self.shape)}, pending={self.pending})"


def _writes(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a function of torch changes an operand, by the names that such functions have."""
    name = getattr(func, "__name__", "")
    if name.endswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
    return name.endswith("_") or kwargs.get("out") is not None


def _flow(tree: Any) -> Flow:
    return next(leaf._node.flow for leaf in tree_leaves(tree) if isinstance(leaf, Deferred))


def resolve(tree: Any) -> Any:
    """The tree with every Deferred replaced by its value."""
    return tree_map_only(Deferred, Deferred.value, tree)


class Captured:
    """Arguments of a call that is to run later, guarded against changes in between."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        kept = tree_map_only(Deferred, lambda d: Deferred(d._node) if d.pending else d.value(), arguments)
        self.arguments: dict[str, Any] = unchanging(kept)
        self.versions = [
            (name, leaf, version(leaf))
            for name, value in self.arguments.items()
            for leaf in tree_leaves(value)
            if isinstance(leaf, Tensor)
        ]

    def get(self) -> dict[str, Any]:
        """The arguments. Raises StaleError when one was written to since."""
        for name, tensor, seen in self.versions:
            if tensor._node.stale if isinstance(tensor, Deferred) else version(tensor) != seen:
                raise StaleError(f"transformer argument {name} was changed in place before the deferred call ran")
        return dict(self.arguments)
