"""Claims about the transformer's call: its arguments, its batch, its output's shape, and the pipeline's guidance."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import diffusers
import torch
from torch import Tensor

from ditpar.conformance.claims_attention import all_sites
from ditpar.conformance.probe import Tap, hooks
from ditpar.conformance.report import FalseClaim, NoClaim
from ditpar.conformance.subject import TOLERANCE, VISIBLE, Call, Subject, distance, record, submodule


def pipelines(subject: Subject) -> str:
    """The named pipeline classes exist, take this transformer class, and have the record's default arguments."""
    family = subject.family
    for name in family.pipelines:
        cls = getattr(diffusers, name, None)
        if cls is None:
            raise FalseClaim(f"diffusers {diffusers.__version__} has no {name}")
        wanted = inspect.signature(cls.__init__).parameters.get("transformer")
        if wanted is None or family.transformer not in str(wanted.annotation):
            raise FalseClaim(f"{name} takes no {family.transformer}")
        call = inspect.signature(cls.__call__).parameters
        unknown = [key for key in (*family.defaults, family.cfg.scale) if key not in call]
        if unknown:
            raise FalseClaim(f"{name} has no argument {', '.join(unknown)}")
    if type(subject.pipe).__name__ not in family.pipelines:
        raise FalseClaim(f"the record does not name {type(subject.pipe).__name__}")
    return type(subject.pipe).__name__


def arguments(subject: Subject) -> str:
    """Arguments are `batched` with the batch in front, `static`, or refused; all that the pipeline passes are known."""
    family = subject.family
    known = (*family.batched, *family.static)
    if twice := set(family.batched) & set(family.static):
        raise FalseClaim(f"{', '.join(sorted(twice))} cannot be both batched and static")
    for call in _batch(subject):
        parameters = inspect.signature(type(call.transformer).forward).parameters
        if wrong := [name for name in known if name not in parameters]:
            raise FalseClaim(f"{family.transformer}.forward has no argument {', '.join(wrong)}")
        if unknown := [name for name in call.arguments if name not in known]:
            raise FalseClaim(f"{type(subject.pipe).__name__} passes {', '.join(unknown)}, which the record leaves out")
        for name in family.batched:
            _expect_batch(name, call.arguments.get(name), call.batch)
    refused = [name for name in parameters if name not in (*known, "self", "return_dict")]
    return f"refused: {', '.join(refused)}" if refused else "none is refused"


def _expect_batch(name: str, value: Any, batch: int) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            _expect_batch(f"{name}[{key}]", item, batch)
    elif isinstance(value, Tensor) and (value.ndim == 0 or value.shape[0] != batch):
        raise FalseClaim(f"{name} has shape {list(value.shape)}: dim 0 is not the batch of {batch}")
    elif isinstance(value, list | tuple) and len(value) not in (1, batch):
        raise FalseClaim(f"{name} has {len(value)} items for a batch of {batch}")


def batch(subject: Subject) -> str:
    """The samples of a call, each run apart with its `batched` arguments cut and the others whole, equal the batch."""
    worst, samples = 0.0, 0
    inputs = subject.variant.inputs(subject.family, subject.pipe, **subject.variant.several)
    images = subject.family.batch(inputs)
    for call in _batch(subject):
        samples = call.batch
        branches = 2 if subject.family.cfg.style == "batched" and subject.family.cfg.active(inputs) else 1
        if samples != images * branches:
            raise FalseClaim(f"a call for {images} images by the record has {samples} samples, not {images * branches}")
        full = {k: _spread(v, samples) if k in subject.family.batched else v for k, v in call.arguments.items()}
        whole = call.run(**full)
        for first, last in ((0, 1), (1, samples)):
            own = {k: _cut(v, samples, first, last) if k in subject.family.batched else v for k, v in full.items()}
            try:
                part = Call(call.name, call.transformer, own).run()
            except Exception as error:  # stock code raises all sorts at shapes that do not fit together
                raise FalseClaim(f"samples {first}-{last - 1} of {samples} do not run apart: {error}") from error
            off = distance(part, whole[first:last])
            worst = max(worst, off)
            if off > TOLERANCE:
                raise FalseClaim(f"samples {first}-{last - 1} of {samples}, run apart, are off by {off:.1e}")
    return f"{samples} samples, off by {worst:.0e}"


def _batch(subject: Subject) -> list[Call]:
    """The first call of each transformer, for several images; with guidance where the pipeline has it."""
    found: dict[str, Call] = {}
    for call in subject.record(**subject.variant.several):
        found.setdefault(call.name, call)
    return list(found.values())


def _spread(value: Any, batch: int) -> Any:
    """A batched argument whose samples differ, so that a sample cannot stand in for another (timesteps, guidance)."""
    if isinstance(value, Mapping):
        return {key: _spread(item, batch) for key, item in value.items()}
    if isinstance(value, Tensor) and value.ndim and value.shape[0] == batch and value.is_floating_point():
        return value * torch.linspace(1, 0.7, batch, dtype=value.dtype).view(-1, *(1,) * (value.ndim - 1))
    if isinstance(value, Tensor) and value.ndim == 1 and value.shape[0] == batch:
        return value - 10 * torch.arange(batch)
    return value


def _cut(value: Any, batch: int, first: int, last: int) -> Any:
    if isinstance(value, Mapping):
        return {key: _cut(item, batch, first, last) for key, item in value.items()}
    if isinstance(value, Tensor) or (isinstance(value, list | tuple) and len(value) == batch):
        return value[first:last]
    return value


def output(subject: Subject) -> str:
    """The output's shape follows from the input's by the record's rule, without running the model."""
    family = subject.family
    for call in subject.calls:
        hidden, config = call.arguments["hidden_states"], call.transformer.config
        if family.output == "tokens":
            features = getattr(submodule(call.transformer, family.exit), "out_features", None)
            rule = (*hidden.shape[:-1], features)
        else:
            rule = (hidden.shape[0], config.get("out_channels") or config["in_channels"], *hidden.shape[2:])
        result = call.run()
        if tuple(result.shape) != rule or result.dtype != hidden.dtype:
            raise FalseClaim(f"the output is {list(result.shape)}, the rule `{family.output}` says {list(rule)}")
    return f"{family.output}: {list(rule)}"


def guidance(subject: Subject) -> str:
    """Guidance is on when the record says so, and then makes one call of twice the batch or two calls a step."""
    family, pipe = subject.family, subject.pipe
    default = inspect.signature(type(pipe).__call__).parameters
    if family.cfg.scale not in default:
        raise FalseClaim(f"{type(pipe).__name__} has no argument {family.cfg.scale}")
    for on, negative in ((True, True), (False, True), (True, False)):
        inputs = subject.variant.inputs(family, pipe, cfg=negative)
        inputs[family.cfg.scale] = 2.0 if on else 1.0
        seen = {name: p.default for name, p in default.items() if p.default is not inspect.Parameter.empty} | inputs
        calls = _first_step(pipe, inputs)
        batches = [call.batch for call in calls]
        expected = [1]
        if family.cfg.active(seen):
            expected = [2] if family.cfg.style == "batched" else [1, 1]
        if batches != expected:
            asked = f"{family.cfg.scale}={inputs[family.cfg.scale]:g} {'with' if negative else 'without'} a negative"
            raise FalseClaim(f"{asked} makes calls of batch {batches} a step; the record says {expected}")
    return f"{family.cfg.style} by {family.cfg.scale}" + ("" if not family.cfg.needs_negative else " and a negative")


def _first_step(pipe: Any, inputs: dict[str, Any]) -> list[Call]:
    """The transformer calls of a pipeline call's first step. A negative prompt that stock code wants is filled in."""
    stock = pipe.encode_prompt
    signature = inspect.signature(stock)

    def encode_prompt(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        if given.get("do_classifier_free_guidance") and given.get("negative_prompt_embeds") is None:
            for name in ("prompt_embeds", "pooled_prompt_embeds", "prompt_attention_mask"):
                if name in given:
                    given[f"negative_{name}"] = given[name]
        return stock(**given)

    vars(pipe)["encode_prompt"] = encode_prompt
    try:
        calls = record(pipe, inputs)
    finally:
        del vars(pipe)["encode_prompt"]
    start = calls[0].arguments["timestep"]
    return [call for call in calls if _same_time(call.arguments["timestep"], start)]


def _same_time(time: Tensor, other: Tensor) -> bool:
    return bool(time.flatten()[-1] == other.flatten()[-1])


def masks(subject: Subject) -> str:
    """Masked text tokens have no influence, the others have; a mask at a site is over keys alone."""
    changed = 0
    for call in subject.calls:
        with hooks() as add, Tap(add, all_sites(subject, call.transformer)) as tap:
            want = call.run()
        for attention in tap.calls:
            if attention.mask is not None and attention.mask.ndim > 2 and attention.mask.shape[-2] > 1:
                raise FalseClaim(f"{attention.site} has a mask with a query axis: {list(attention.mask.shape)}")
        name = next((n for n in call.arguments if n.startswith("encoder_") and n.endswith("_mask")), None)
        if name is None:
            continue
        keep = call.arguments[name].bool()
        if bool(keep.all()):
            continue
        text = call.arguments["encoder_hidden_states"]
        noise = torch.randn(text.shape, generator=torch.Generator().manual_seed(0)).to(text.dtype)
        off = distance(call.run(encoder_hidden_states=torch.where(keep[..., None], text, noise)), want)
        if off > TOLERANCE:
            raise FalseClaim(f"other values in masked text tokens change the result by {off:.1e}")
        moved = distance(call.run(encoder_hidden_states=torch.where(keep[..., None], noise, text)), want)
        ignored = distance(call.run(**{name: torch.ones_like(call.arguments[name])}), want)
        if min(moved, ignored) < VISIBLE:
            raise FalseClaim(
                f"kept text tokens change the result by {moved:.1e}, dropping the mask by {ignored:.1e}: no proof"
            )
        changed += int((~keep).sum())
    if not changed:
        raise NoClaim("no masked tokens in this variant")
    return f"{changed} masked text tokens without influence"
