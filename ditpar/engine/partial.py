"""Models of which a rank holds its own stage alone: other stages' blocks are shapes without memory (meta)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import accelerate
import diffusers
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn

from ditpar.errors import ModelError, PlanError
from ditpar.family import Family, family_of
from ditpar.methods.stages import block_split
from ditpar.plan import Plan

WEIGHTS = "diffusion_pytorch_model"
_SOURCE = "_ditpar_source"


class Source:
    """Where the weights of a partial model come from.

    Args:
        folder: of the transformer, with `config.json` and safetensors files.
        dtype: of the weights; None keeps that of the files.
    """

    def __init__(self, folder: Path, variant: str | None, dtype: torch.dtype | None) -> None:
        self.folder, self.variant, self.dtype = folder, variant, dtype

    def files(self) -> list[Path]:
        """Raises ModelError when there are none."""
        stem = f"{WEIGHTS}.safetensors" if self.variant is None else f"{WEIGHTS}.{self.variant}.safetensors"
        middle = "" if self.variant is None else f".{self.variant}"
        index = self.folder / f"{WEIGHTS}.safetensors.index{middle}.json"
        if (self.folder / stem).exists():
            return [self.folder / stem]
        if index.exists():
            return [self.folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        raise ModelError(f"model: {self.folder} has neither {stem} nor {index.name}")

    def fill(self, model: nn.Module, wanted: Callable[[str], bool]) -> None:
        """Reads the wanted weights, and no others, into the model."""
        exact = getattr(model, "_keep_in_fp32_modules", None) or []
        state: dict[str, torch.Tensor] = {}
        for file in self.files():
            with safe_open(file, framework="pt") as tensors:
                for name in filter(wanted, tensors.keys()):
                    value = tensors.get_tensor(name)
                    if self.dtype is not None and value.is_floating_point():
                        value = value.to(torch.float32 if any(m in name.split(".") for m in exact) else self.dtype)
                    state[name] = value
        unexpected = model.load_state_dict(state, strict=False, assign=True).unexpected_keys
        missing = [n for n, p in model.named_parameters() if wanted(n) and p.device.type == "meta"]
        if missing or unexpected:
            raise ModelError(f"model: {self.folder}: weights missing {missing[:3]}, unknown {unexpected[:3]}")


def load_stage(
    path: str | Path,
    plan: Plan | str,
    torch_dtype: torch.dtype | None = None,
    rank: int | None = None,
    variant: str | None = None,
) -> Any:
    """The transformer of a model folder with this rank's stage alone. To be given to `from_pretrained(transformer=...)`.

    Reads no weights of other stages' blocks. `parallelize` then takes this plan alone; `restore` reads what is missing;
    saving is refused.

    Args:
        path: a pipeline's folder, or that of its transformer.
        plan: with `pipe`.
        torch_dtype: of the weights, as in `from_pretrained`.
        rank: of the default process group without it.

    Raises:
        ModelError: no weights in safetensors, quantised weights, or a class without a family record.
        PlanError: a plan without stages.
    """
    plan = Plan.parse(plan)
    folder = Path(path)
    folder = folder / "transformer" if (folder / "transformer").is_dir() else folder
    config = json.loads((folder / "config.json").read_text())
    if plan.pipe == 1:
        raise PlanError(f"plan: {plan} has no stages; add pipe=2, or load the model with from_pretrained")
    if "quantization_config" in config:
        raise ModelError(
            f"model: {folder} is quantised, and cannot be loaded stage by stage; load it with from_pretrained"
        )
    family = family_of(config["_class_name"])
    with accelerate.init_empty_weights(include_buffers=False):
        model = getattr(diffusers, config["_class_name"]).from_config(config)
    index = plan.coordinate("pipe", dist.get_rank() if rank is None else rank)
    foreign = dict(foreign_blocks(family, model, plan, index))
    source = Source(folder, variant, torch_dtype)
    source.fill(model, lambda name: not _within(name, foreign))
    for block in foreign.values():
        stay(block)
    vars(model)[_SOURCE] = source
    vars(model)["save_pretrained"] = _refuse_to_save
    model.register_to_config(_name_or_path=str(folder))
    return model.eval()


def foreign_blocks(family: Family, model: nn.Module, plan: Plan, index: int) -> Iterator[tuple[str, nn.Module]]:
    """The blocks of other stages than the `index`-th, by path."""
    sizes = block_split(family, model, plan.pipe, plan.split)
    begin, end = sum(sizes[:index]), sum(sizes[: index + 1])
    paths = [f"{name}.{i}" for name in family.blocks for i, _ in enumerate(model.get_submodule(name).children())]
    for number, path in enumerate(paths):
        if not begin <= number < end:
            yield path, model.get_submodule(path)


def stay(block: nn.Module) -> None:
    """Keeps a block where it is when its model is moved or cast."""
    vars(block)["_apply"] = lambda *_, **__: block


@contextmanager
def staying(family: Family, model: nn.Module, plan: Plan, rank: int) -> Iterator[None]:
    """Moves of the model in this context leave other stages' blocks where they are."""
    foreign = [block for _, block in foreign_blocks(family, model, plan, plan.coordinate("pipe", rank))]
    for block in foreign:
        stay(block)
    try:
        yield
    finally:
        for block in foreign:
            vars(block).pop("_apply", None)


def is_partial(model: nn.Module) -> bool:
    return _SOURCE in vars(model)


def complete(model: nn.Module) -> None:
    """Reads what a partial model lacks, onto the device of the rest."""
    source: Source | None = vars(model).pop(_SOURCE, None)
    if source is None:
        return
    lacking = {n.rpartition(".")[0] for n, p in model.named_parameters() if p.device.type == "meta"}
    device = next(p.device for p in model.parameters() if p.device.type != "meta")
    for module in model.modules():
        vars(module).pop("_apply", None)
    source.fill(model, lambda name: name.rpartition(".")[0] in lacking)
    model.to(device)
    vars(model).pop("save_pretrained", None)


def _within(name: str, paths: Iterable[str]) -> bool:
    return any(name.startswith(f"{path}.") for path in paths)


def _refuse_to_save(*_: Any, **__: Any) -> None:
    raise PlanError("save_pretrained: this rank holds the blocks of its own stage alone; call ditpar.restore first")
