"""load(): a gang and its drop-in pipeline, from one ordinary Python process."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.utils import deprecation_utils

from ditpar.errors import ModelError, PlanError, RequestError
from ditpar.gang.calls import Loading, Setup
from ditpar.gang.gang import Gang
from ditpar.gang.local import LocalLauncher
from ditpar.gang.modelfolder import DEFAULT_MODEL, Model, read_model
from ditpar.gang.pipeline import RemotePipeline, remote_class
from ditpar.plan import Plan, auto

_DTYPE = "dtype" if hasattr(deprecation_utils, "_TORCH_DTYPE_DEPRECATION_MESSAGE") else "torch_dtype"
"""diffusers renamed the argument."""
_HUB = ("revision", "token", "cache_dir", "local_files_only")


def load(
    path_or_id: str | Path = DEFAULT_MODEL,
    plan: Plan | str = "auto",
    ranks: int | None = None,
    torch_dtype: torch.dtype | dict[str, torch.dtype] | None = None,
    threads: int | None = None,
    *,
    device: str | None = None,
    patience: tuple[float, float] = (600.0, 60.0),
    quiet: bool = False,
    trace: bool = False,
    **from_pretrained_kwargs: Any,
) -> RemotePipeline:
    """Loads a pipeline onto a gang of local ranks; the result is used like the diffusers pipeline itself.

    Args:
        path_or_id: a model folder, or a hub id. Without one, the bundled model.
        plan: a Plan or its text form; `auto` chooses for each call.
        ranks: number of ranks, for `auto`; must agree with a plan. `auto` without it uses every CUDA device, or one rank.
        torch_dtype: of the weights, as in `from_pretrained`; else what the model's `ditpar.json` states.
        threads: CPU threads of each rank; the cores shared out by default.
        device: `cpu` or `cuda`; CUDA where there is any by default.
        patience: seconds without a step after which the gang is ended: while the time of steps is not known (before the
            third, after the last, in other commands), and the least in between, where it is 20 times the median step.
        quiet: no bars while the weights load.
        trace: after each call, `events` of the result has what each rank did when (ditpar.trace.chrome writes them).
        from_pretrained_kwargs: passed on.

    Raises:
        ModelError, PlanError, RequestError: before any process starts; ModelError also when loading fails.
        GangError: a rank failed while it began.
    """
    if ranks is not None and (isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1):
        raise PlanError(f"ranks={ranks!r} must be a whole number of at least 1")
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
        raise RequestError(f"threads={threads!r} must be a whole number of at least 1")
    options = dict(from_pretrained_kwargs)
    if "device_map" in options:
        raise RequestError("device_map: ditpar places the pipeline itself; choose by ranks, plan and device")
    given = [
        name for name, value in options.items() if value is None or not isinstance(value, str | bool | int | float)
    ]
    model = read_model(path_or_id, given, **{name: options[name] for name in _HUB if name in options})
    devices = _devices(device)
    fixed = None if plan == "auto" else Plan.parse(plan)
    world = fixed.world if fixed is not None else ranks or max(devices, 1)
    if fixed is not None:
        fixed.validate(model.family, model.config, None, ranks or world)
    if devices and world > devices:
        raise PlanError(
            f"plan: {fixed or plan} needs {world} ranks but there {'is' if devices == 1 else 'are'} {devices} CUDA "
            f"device{'s' * (devices > 1)}; use fewer ranks, or device='cpu'"
        )
    dtype = options.pop("dtype", None) or torch_dtype or (getattr(torch, model.dtype) if model.dtype else None)
    if dtype is not None:
        options[_DTYPE] = dtype
    options.setdefault("use_safetensors", True)
    bars = not quiet and diffusers.utils.logging.is_progress_bar_enabled()
    loading = Loading(model.path, options, bars, each_rank="quantization_config" in options)
    names = [f"diffusers.{model.pipeline}", *filter(None, model.components.values())]
    launcher = LocalLauncher(world, names, loading)
    gang = Gang(launcher, patience)
    try:
        if fixed is not None or world == 1:
            launcher.warm_up()  # it imports what the next lines import here
        stock = pipeline_class(model)
        first = fixed or auto(model.family, model.config, _usual_call(model, stock), world)
        first.validate(model.family, model.config, None, world)
        setup = Setup(str(first), world, "cuda" if devices else "cpu", threads or max(1, _cores() // world), trace)
        return remote_class(stock)(gang, setup, model, stock, fixed)
    except BaseException:
        gang.close()
        raise


def _devices(device: str | None) -> int:
    """CUDA devices to use; none for ranks on the CPU."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device not in (None, "cpu", "cuda"):
        raise RequestError(f"device={device!r} must be cpu or cuda")
    if device == "cuda" and not found:
        raise RequestError("device='cuda': this machine has no CUDA device that torch can use; use device='cpu'")
    return 0 if device == "cpu" else found


def _cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def pipeline_class(model: Model) -> type:
    """The diffusers class that the model names. Raises ModelError when this diffusers has none."""
    stock = getattr(diffusers, model.pipeline, None)
    if not isinstance(stock, type):
        raise ModelError(f"model: diffusers {diffusers.__version__} has no pipeline class {model.pipeline}")
    return stock


def _usual_call(model: Model, stock: type) -> dict[str, Any]:
    """A call that gives nothing but a prompt: what `auto` binds before the first one."""
    parameters = inspect.signature(stock.__call__).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty} | model.defaults | {"prompt": "any"}
