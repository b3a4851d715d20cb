"""Deferred tensors: the result of a transformer call that has not run yet.

A Deferred has shape, dtype and device and no data. Views of it stay deferred; any other operation first computes it
and goes on with plain tensors, so stock code is always right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ditpar.errors import StaleError

_VIEWS = frozenset(
    {
        torch.ops.aten.slice.Tensor,
        torch.ops.aten.select.int,
        torch.ops.aten.unsqueeze.default,
        torch.ops.aten.squeeze.dim,
        torch.ops.aten.view.default,
        torch.ops.aten.permute.default,
        torch.ops.aten.transpose.int,
        torch.ops.aten.alias.default,
        torch.ops.aten.detach.default,
    }
)


class Deferred(torch.Tensor):
    """A tensor whose value is computed at first use.

    Args:
        compute: returns the value; called once at most, and must give a tensor of the stated shape and dtype.
    """

    _compute: Callable[[], Tensor] | None
    _value: Tensor | None

    @staticmethod
    def __new__(
        cls, compute: Callable[[], Tensor], shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> Deferred:
        self: Deferred = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        self._compute, self._value = compute, None
        return self

    def __init__(self, *args: Any) -> None:
        pass

    def value(self) -> Tensor:
        """The plain tensor. Runs the pending work if need be."""
        if self._value is None:
            assert self._compute is not None
            value = self._compute()
            if value.shape != self.shape or value.dtype != self.dtype:
                raise AssertionError(
                    f"deferred call promised {list(self.shape)} {self.dtype}, gave {list(value.shape)} {value.dtype}"
                )
            self._value, self._compute = value, None
        return self._value

    @property
    def pending(self) -> bool:
        return self._value is None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        source = args[0] if args else None
        if func in _VIEWS and isinstance(source, Deferred) and source.pending:
            rest = args[1:]
            like = func(
                torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="meta"), *rest, **kwargs
            )
            return Deferred(lambda: func(source.value(), *rest, **kwargs), like.shape, like.dtype, source.device)
        args, kwargs = resolve((args, kwargs))
        return func(*args, **kwargs)

    # What reads memory without an operation has no dispatch to catch it.
    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        return self.value().numpy(*args, **kwargs)

    def tolist(self) -> Any:
        return self.value().tolist()

    def data_ptr(self) -> int:
        return self.value().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.value().untyped_storage()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.value().__array__(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.value().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.value().clone()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Deferred(shape={list(self.shape)}, pending={self.pending})"


def resolve(tree: Any) -> Any:
    """The tree with every Deferred replaced by its value."""
    return tree_map_only(Deferred, Deferred.value, tree)


class Captured:
    """Arguments of a call that is to run later, guarded against changes in between."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        self.versions: list[tuple[str, Tensor, int]] = []
        for name, value in arguments.items():
            for tensor in value.values() if isinstance(value, dict) else [value]:
                if isinstance(tensor, Tensor) and not isinstance(tensor, Deferred) and not tensor.is_inference():
                    self.versions.append((name, tensor, tensor._version))

    def get(self) -> dict[str, Any]:
        """The arguments. Raises StaleError when one was written to since."""
        for name, tensor, version in self.versions:
            if tensor._version != version:
                raise StaleError(f"transformer argument {name} was changed in place before the deferred call ran")
        return dict(self.arguments)
