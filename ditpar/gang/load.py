"""load(): a gang and its drop-in pipeline, from one ordinary Python process."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.utils import deprecation_utils

from ditpar.errors import ModelError, PlanError
from ditpar.gang.calls import Setup
from ditpar.gang.local import LocalGang
from ditpar.gang.modelfolder import DEFAULT_MODEL, Model, read_model
from ditpar.gang.pipeline import RemotePipeline, remote_class
from ditpar.plan import Plan, auto

_DTYPE = "dtype" if hasattr(deprecation_utils, "_TORCH_DTYPE_DEPRECATION_MESSAGE") else "torch_dtype"
"""diffusers renamed the argument."""


def load(
    path_or_id: str | Path = DEFAULT_MODEL,
    plan: Plan | str = "auto",
    *,
    ranks: int | None = None,
    torch_dtype: torch.dtype | None = None,
    threads: int | None = None,
    patience: tuple[float, float] = (600.0, 60.0),
    quiet: bool = False,
    **from_pretrained_kwargs: Any,
) -> RemotePipeline:
    """Loads a pipeline onto a gang of local ranks; the result is used like the diffusers pipeline itself.

    Args:
        path_or_id: a model folder, or a hub id. Without one, the bundled model.
        plan: a Plan or its text form; `auto` chooses for each call.
        ranks: number of ranks, for `auto`; must agree with a plan. `auto` without it uses every CUDA device, or one rank.
        torch_dtype: of the weights, as in `from_pretrained`; else what the model's `ditpar.json` states.
        threads: CPU threads of each rank; the cores shared out by default.
        patience: seconds without a sign of life after which the gang is ended, at first and once steps are known.
        quiet: no bars while the weights load.
        from_pretrained_kwargs: passed on.

    Raises:
        ModelError, PlanError: before any process starts.
        GangError: a rank failed while loading.
    """
    if ranks is not None and (isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1):
        raise PlanError(f"ranks={ranks!r} must be a whole number of at least 1")
    model = read_model(path_or_id)
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    fixed = None if plan == "auto" else Plan.parse(plan)
    world = fixed.world if fixed is not None else ranks or max(devices, 1)
    if fixed is not None:
        fixed.validate(model.family, model.config, None, ranks or world)
    first = fixed or auto(model.family, model.config, _usual_call(model), world)
    first.validate(model.family, model.config, None, world)
    if devices and world > devices:
        raise PlanError(f"plan: {first} needs {world} ranks but there are {devices} CUDA devices")
    options = dict(from_pretrained_kwargs)
    dtype = torch_dtype or (getattr(torch, model.dtype) if model.dtype else None)
    if dtype is not None:
        options[_DTYPE] = dtype
    setup = Setup(model.path, str(first), world, "cuda" if devices else "cpu", options, patience[0], quiet)
    stock = pipeline_class(model)
    gang = LocalGang(world, threads or max(1, (os.cpu_count() or 1) // world), list(model.components), patience)
    try:
        return remote_class(stock)(gang, setup, model, stock, fixed)
    except BaseException:
        gang.close()
        raise


def pipeline_class(model: Model) -> type:
    """The diffusers class that the model names. Raises ModelError when this diffusers has none."""
    stock = getattr(diffusers, model.pipeline, None)
    if not isinstance(stock, type):
        raise ModelError(f"model: diffusers {diffusers.__version__} has no pipeline class {model.pipeline}")
    return stock


def _usual_call(model: Model) -> dict[str, Any]:
    """A call that gives nothing but a prompt: what `auto` binds before the first one."""
    parameters = inspect.signature(pipeline_class(model).__call__).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty} | model.defaults | {"prompt": "any"}
