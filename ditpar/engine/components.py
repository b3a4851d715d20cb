"""Components once: text encoders and VAE run on rank 0, and every rank gets the result."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ditpar.comm import Group
from ditpar.dataflow.deferred import resolve
from ditpar.engine.undo import Changes, wrap_call

METHOD = "components"
_METHODS = ("encode", "decode")


def once_modules(components: dict[str, Any], transformers: set[str]) -> dict[str, nn.Module]:
    """The modules that run on one rank: all but the transformers."""
    return {n: m for n, m in components.items() if isinstance(m, nn.Module) and n not in transformers}


def drop_weights(modules: dict[str, nn.Module], group: Group) -> None:
    """Frees the modules' memory on all ranks but the first: their parameters and buffers become shapes (meta)."""
    if group.index > 0:
        for module in modules.values():
            module.to("meta")


def fetch_weights(modules: dict[str, nn.Module], group: Group, device: torch.device) -> None:
    """Undoes `drop_weights`: every rank gets rank 0's weights and buffers. Collective."""
    for module in modules.values():
        if group.index > 0:
            module.to_empty(device=device)
        for tensor in [*module.parameters(), *module.buffers()]:
            value = tensor.detach() if tensor.is_contiguous() else tensor.detach().contiguous()
            group.broadcast(METHOD, value)
            if group.index > 0:
                tensor.detach().copy_(value)


def share_components(changes: Changes, modules: dict[str, nn.Module], group: Group) -> None:
    """Leads the modules' calls through rank 0 of `group`.

    Raises on every rank what rank 0 raises.
    """
    if group.size == 1:
        return

    def once(device: Callable[[], torch.device], call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = resolve((args, kwargs))
            result: Any = None
            failure: Exception | None = None
            if group.index == 0:
                try:
                    result = call(*args, **kwargs)
                except Exception as error:  # noqa: BLE001  carried to the other ranks, which wait for this result
                    failure = error
            failure, result = group.broadcast_tree(METHOD, (failure, result), device=device())
            if failure is not None:
                raise failure
            return result

        return wrapped

    for module in modules.values():

        def device(module: nn.Module = module) -> torch.device:
            found = next((p.device for p in module.parameters()), torch.device("cpu"))
            return torch.device("cpu") if found.type == "meta" else found

        wrap_call(changes, module, partial(once, device))
        for method in _METHODS:
            if hasattr(module, method):
                changes.set(module, method, once(device, getattr(module, method)))
