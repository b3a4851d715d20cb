"""Components once: text encoders and VAE run on rank 0, and every rank gets the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ditpar.comm import Group
from ditpar.engine.undo import Changes, wrap_call

METHOD = "components"
_METHODS = ("encode", "decode")


def share_components(changes: Changes, components: dict[str, Any], transformers: set[str], group: Group) -> None:
    """Leads the calls of all modules but the transformers through rank 0 of `group`.

    Raises on every rank what rank 0 raises.
    """
    if group.size == 1:
        return

    def once(call: Callable[..., Any], device: Callable[[], torch.device]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result: Any = None
            failure: Exception | None = None
            if group.index == 0:
                try:
                    result = call(*args, **kwargs)
                except Exception as error:  # carried to the other ranks, which wait for this result
                    failure = error
            failure, result = group.broadcast_tree(METHOD, (failure, result), device=device())
            if failure is not None:
                raise failure
            return result

        return wrapped

    for name, module in components.items():
        if not isinstance(module, nn.Module) or name in transformers:
            continue

        def device(module: nn.Module = module) -> torch.device:
            found = next((p.device for p in module.parameters()), torch.device("cpu"))
            return torch.device("cpu") if found.type == "meta" else found

        wrap_call(changes, module, lambda call, d=device: once(call, d))
        for method in _METHODS:
            if hasattr(module, method):
                changes.set(module, method, once(getattr(module, method), device))
