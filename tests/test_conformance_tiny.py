"""The tiny pipelines: seeded, stock, odd in shape, and no trace left in the process."""

from __future__ import annotations

import inspect

import diffusers
import pytest
import torch

from ditpar.conformance.tiny import build, inputs
from ditpar.conformance.variants import VARIANTS, Variant, variants
from ditpar.errors import ModelError, RequestError
from ditpar.family import Family, families

FAMILIES = families()
ALL = [pytest.param(FAMILIES[name], v, id=f"{name}-{v.name}") for name, every in VARIANTS.items() for v in every]


@pytest.mark.parametrize(("family", "variant"), ALL)
def test_every_variant_runs_on_the_stock_class(family: Family, variant: Variant) -> None:
    pipe = variant.build(family)
    assert type(pipe) is getattr(diffusers, variant.pipeline or family.pipelines[0])
    out = pipe(**variant.inputs(family, pipe))[0]
    assert torch.isfinite(out).all() and 0.3 < out.std() < 5


def test_every_pipeline_of_a_record_has_a_variant() -> None:
    for family in FAMILIES.values():
        built = {variant.pipeline or family.pipelines[0] for variant in variants(family)}
        assert built == set(family.pipelines)


@pytest.mark.parametrize("name", FAMILIES)
def test_everything_follows_from_the_seed(name: str) -> None:
    family = FAMILIES[name]

    def run(seed: int) -> torch.Tensor:
        pipe = build(family, seed=seed)
        return pipe(**inputs(family, pipe, seed=seed))[0]

    assert torch.equal(run(0), run(0))
    assert not torch.allclose(run(0), run(1))


def test_the_default_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    family = FAMILIES["flux"]
    pipe = build(family)
    pipe(**inputs(family, pipe))
    assert torch.equal(torch.get_rng_state(), before)


def test_no_parameter_is_constant() -> None:
    for name, family in FAMILIES.items():
        for key, parameter in build(family).transformer.named_parameters():
            assert parameter.numel() == 1 or parameter.std() > 0.01, f"{name} {key}"


@pytest.mark.parametrize(("name", "mask"), [("qwenimage", "prompt_embeds_mask"), ("pixart", "prompt_attention_mask")])
def test_masks_differ_between_prompts_and_branches(name: str, mask: str) -> None:
    call = inputs(FAMILIES[name], build(FAMILIES[name]), batch=2, masked=True)
    lengths = [*call[mask].sum(1).tolist(), *call[f"negative_{mask}"].sum(1).tolist()]
    assert lengths == [6, 5, 4, 3]


def test_branches_may_have_texts_of_unequal_length() -> None:
    call = inputs(FAMILIES["wan"], build(FAMILIES["wan"]), text_tokens=(9, 5))
    assert (call["prompt_embeds"].shape[1], call["negative_prompt_embeds"].shape[1]) == (9, 5)


def test_bf16_weights_are_the_fp32_ones_rounded() -> None:
    full, half = build(FAMILIES["sd3"]), build(FAMILIES["sd3"], dtype=torch.bfloat16)
    for a, b in zip(full.transformer.parameters(), half.transformer.parameters(), strict=True):
        assert torch.equal(a.bfloat16(), b)


def test_mistakes_are_named() -> None:
    with pytest.raises(ModelError, match="FluxTransformer2DModel has no config value wings"):
        build(FAMILIES["flux"], wings=2)
    with pytest.raises(ModelError, match="no class NoSuchPipeline"):
        build(FAMILIES["flux"], "NoSuchPipeline")
    with pytest.raises(RequestError, match="FluxPipeline takes no text mask"):
        inputs(FAMILIES["flux"], build(FAMILIES["flux"]), masked=True)


def test_token_times_differ_between_tokens() -> None:
    variant = next(v for v in VARIANTS["wan"] if v.name == "token times")
    pipe = variant.build(FAMILIES["wan"])
    times: list[torch.Tensor] = []
    pipe.transformer.register_forward_pre_hook(lambda _m, _a, kw: times.append(kw["timestep"]), with_kwargs=True)
    pipe(**variant.inputs(FAMILIES["wan"], pipe))
    assert times[0].ndim == 2 and times[0].unique().numel() > 1


def test_calls_are_what_the_pipelines_take() -> None:
    for family in FAMILIES.values():
        for variant in variants(family):
            if (variant.pipeline or "").startswith("QwenImageEdit"):
                continue
            pipe = variant.build(family)
            assert set(variant.inputs(family, pipe)) <= set(inspect.signature(type(pipe).__call__).parameters)
