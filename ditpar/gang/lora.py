"""LoRA loading that does not pass over an adapter which matches nothing."""

from __future__ import annotations

from typing import Any

from torch import nn

from ditpar.errors import RequestError


def checked_load(pipe: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """`pipe.load_lora_weights`; raises RequestError when the adapter changed no layer, and takes it off again."""
    before = _adapters(pipe)
    pipe.load_lora_weights(*args, **kwargs)
    added = _adapters(pipe) - before
    wanted = kwargs.get("adapter_name")
    if not added and wanted not in before:
        raise RequestError("load_lora_weights: the adapter matches no layer of this model")


def _adapters(pipe: Any) -> set[str]:
    """Names of the adapters that have a layer in some module of the pipeline."""
    found: set[str] = set()
    for module in pipe.components.values():
        if isinstance(module, nn.Module):
            for layer in module.modules():
                lora = getattr(layer, "lora_A", None)
                if isinstance(lora, nn.ModuleDict):
                    found.update(lora)
    return found
