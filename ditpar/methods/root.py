"""The root seam: the transformer's entry as `arguments -> one tensor`, which methods wrap one around another."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ditpar.errors import PlanError
from ditpar.family import Family

Arguments = dict[str, Any]
Root = Callable[[Arguments], Tensor]
"""A transformer call: its arguments by name, without `return_dict`, to its output tensor."""


def as_stock(family: Family, transformer: nn.Module, root: Root) -> Callable[..., Any]:
    """A function with the transformer's own calling convention that goes through `root`.

    Raises PlanError, naming the argument, for arguments that the Family record does not know: they could not be cut.
    """
    signature = inspect.signature(type(transformer).forward)
    known = {*family.batched, *family.static}

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(transformer, *args, **kwargs).arguments
        bound.pop(next(iter(signature.parameters)))
        return_dict = bound.pop("return_dict", True)
        arguments = {name: value for name, value in bound.items() if value is not None}
        for name, value in arguments.items():
            default = signature.parameters[name].default
            if name not in known and value is not default and value != default:
                raise PlanError(f"{family.transformer} argument {name} is not supported by this plan; use plan single")
            inner = tree_leaves(value) if isinstance(value, dict) and name in family.static else []
            if any(isinstance(leaf, torch.Tensor) for leaf in inner):
                raise PlanError(f"{family.transformer} argument {name}: tensors in it are not supported by this plan")
        sample = root(arguments)
        return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)

    return call


def innermost(call: Callable[..., Any]) -> Root:
    """The root of a transformer's own call."""

    def root(arguments: Arguments) -> Tensor:
        return call(**arguments, return_dict=False)[0]

    return root


def output_shape(family: Family, transformer: Any, arguments: Arguments) -> torch.Size:
    """The shape that the call will return, by the Family's rule."""
    config = transformer.config
    hidden = arguments["hidden_states"]
    channels = config.get("out_channels") or config["in_channels"]
    if family.output == "latent":
        return torch.Size((hidden.shape[0], channels, *hidden.shape[2:]))
    return torch.Size((*hidden.shape[:-1], transformer.get_submodule(family.exit).out_features))
