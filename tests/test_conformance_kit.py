"""The conformance kit: every record is proved, and every kind of lie in a record or model is found by its own check."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from ditpar.conformance.kit import CLAIMS, conform, prove
from ditpar.conformance.probe import Hooks
from ditpar.conformance.report import Report, Result
from ditpar.conformance.subject import Subject
from ditpar.conformance.variants import variants
from ditpar.errors import ModelError
from ditpar.family import Embed, Family, Guidance, Slice, families

FAMILIES = families()


@pytest.mark.parametrize("name", FAMILIES)
def test_every_claim_of_the_record_is_proved(name: str) -> None:
    report = conform(name)
    assert report.ok, str(report)
    assert {r.variant for r in report.results} == {v.name for v in variants(FAMILIES[name])}
    assert {r.claim for r in report.results} == {claim.name for claim in CLAIMS}


@cache
def _subject(family: str, variant: str) -> Subject:
    record = FAMILIES[family]
    return Subject.of(record, next(v for v in variants(record) if v.name == variant))


def _only(results: list[Result], claim: str) -> Result:
    """The one false result; what builds on it may be open, all else stands."""
    false = [r for r in results if r.status == "false"]
    assert [r.claim for r in false] == [claim], [(r.claim, r.detail) for r in false]
    dependent = {claim}
    for each in CLAIMS:
        if dependent & set(each.needs):
            dependent.add(each.name)
    assert {r.claim for r in results if r.status == "open"} == dependent - {claim}
    return false[0]


def _without(family: str, source: str, item: int | str) -> tuple[Slice, ...]:
    kept = tuple(s for s in FAMILIES[family].slices if (s.source, s.item) != (source, item))
    assert len(kept) < len(FAMILIES[family].slices)
    return kept


def _with(family: str, source: str, item: int | str, **changes: Any) -> tuple[Slice, ...]:
    return tuple(replace(s, **changes) if (s.source, s.item) == (source, item) else s for s in FAMILIES[family].slices)


def _less(family: str, field: str, name: str) -> dict[str, tuple[str, ...]]:
    return {field: tuple(n for n in getattr(FAMILIES[family], field) if n != name)}


def _moved(family: str, name: str) -> dict[str, tuple[str, ...]]:
    """A batched argument called static."""
    return {**_less(family, "batched", name), "static": (*FAMILIES[family].static, name)}


_F = FAMILIES
LIES: list[tuple[str, str, str, dict[str, Any]]] = [
    ("pipelines", "flux", "plain", {"pipelines": ("FluxPipeline", "NoSuchPipeline")}),
    ("pipelines", "flux", "plain", {"pipelines": ("FluxPipeline", "StableDiffusionPipeline")}),
    ("pipelines", "flux", "plain", {"pipelines": ("FluxKontextPipeline",)}),
    ("pipelines", "sd3", "plain", {"defaults": {"wings": 2}}),
    ("pipelines", "sd3", "plain", {"cfg": Guidance("batched", "wing_scale")}),
    ("arguments", "flux", "plain", _less("flux", "batched", "pooled_projections")),
    ("arguments", "flux", "plain", _less("flux", "static", "txt_ids")),
    ("arguments", "flux", "plain", {"batched": (*_F["flux"].batched, "wings")}),
    ("arguments", "flux", "plain", {"static": (*_F["flux"].static, "timestep")}),
    ("arguments", "flux", "plain", {**_less("flux", "static", "img_ids"), "batched": (*_F["flux"].batched, "img_ids")}),
    ("arguments", "pixart", "size conditions", _less("pixart", "batched", "added_cond_kwargs")),
    ("batch", "flux", "plain", _moved("flux", "timestep")),
    ("batch", "flux", "guidance", _moved("flux", "guidance")),
    ("batch", "sd3", "plain", _moved("sd3", "pooled_projections")),
    ("batch", "pixart", "masked", _moved("pixart", "encoder_attention_mask")),
    ("batch", "pixart", "size conditions", _moved("pixart", "added_cond_kwargs")),
    ("batch", "qwenimage", "plain", _moved("qwenimage", "encoder_hidden_states")),
    ("batch", "wan", "token times", _moved("wan", "timestep")),
    ("batch", "wan", "image embeddings", _moved("wan", "encoder_hidden_states_image")),
    ("cfg", "flux", "plain", {"cfg": Guidance("batched", "true_cfg_scale", needs_negative=True)}),
    ("cfg", "flux", "plain", {"cfg": Guidance("separate", "true_cfg_scale")}),
    ("cfg", "flux", "plain", {"cfg": Guidance("separate", "guidance_scale", needs_negative=True)}),
    ("cfg", "sd3", "plain", {"cfg": Guidance("batched", "guidance_scale", needs_negative=True)}),
    ("cfg", "wan", "plain", {"cfg": Guidance("batched", "guidance_scale")}),
    ("cfg", "qwenimage", "plain", {"cfg": Guidance("separate", "guidance_scale", needs_negative=True)}),
    ("blocks", "flux", "plain", {"blocks": ("single_transformer_blocks", "transformer_blocks")}),
    ("blocks", "flux", "plain", {"blocks": ("transformer_blocks",)}),
    ("blocks", "wan", "plain", {"blocks": ("transformer_blocks",)}),
    ("streams", "flux", "plain", {"streams": {"hidden_states": "text", "encoder_hidden_states": "image"}}),
    ("streams", "flux", "plain", {"streams": {"hidden_states": "image"}}),
    ("streams", "sd3", "plain", {"returns": ("image", "text")}),
    ("streams", "pixart", "plain", {"returns": ("text", "image")}),
    ("streams", "qwenimage", "plain", {"returns": ("image",)}),
    ("streams", "wan", "plain", {"streams": {"x": "image"}}),
    ("exit", "flux", "plain", {"exit": "norm_out"}),
    ("exit", "sd3", "plain", {"exit": "context_embedder"}),
    ("exit", "wan", "plain", {"exit": "final_layer"}),
    ("output", "flux", "plain", {"output": "latent"}),
    ("output", "pixart", "plain", {"output": "tokens"}),
    ("output", "wan", "plain", {"output": "tokens"}),
    ("sites", "sd3", "dual attention", {"sites": {"attn": "joint"}}),
    ("sites", "flux", "plain", {"sites": {"attn": "image"}}),
    ("sites", "flux", "plain", {"sites": {"attention": "joint"}}),
    ("sites", "pixart", "plain", {"sites": {"attn1": "image", "attn2": "image"}}),
    ("sites", "wan", "plain", {"sites": {"attn2": "image"}}),
    ("joint", "flux", "plain", {"joint": "image_first"}),
    ("joint", "sd3", "plain", {"joint": "text_first"}),
    ("joint", "qwenimage", "plain", {"joint": None}),
    ("joint", "pixart", "plain", {"joint": "text_first"}),
    ("slices", "flux", "plain", {"slices": _without("flux", "pos_embed", 1)}),
    ("slices", "flux", "reference", {"slices": _with("flux", "pos_embed", 0, rows="image")}),
    ("slices", "flux", "plain", {"slices": _with("flux", "pos_embed", 0, dim=1)}),
    ("slices", "sd3", "plain", {"slices": (Slice("pos_embed", 0, 1, "image"),)}),
    ("slices", "pixart", "plain", {"slices": (Slice("block", "encoder_hidden_states", 1, "text"),)}),
    ("slices", "qwenimage", "plain", {"slices": _without("qwenimage", "pos_embed", 0)}),
    ("slices", "qwenimage", "plain", {"slices": _without("qwenimage", "pos_embed", 1)}),
    ("slices", "qwenimage", "masked", {"slices": _without("qwenimage", "block", "encoder_hidden_states_mask")}),
    ("slices", "qwenimage", "two modulations", {"slices": _without("qwenimage", "block", "modulate_index")}),
    ("slices", "wan", "plain", {"slices": _without("wan", "rope", 0)}),
    ("slices", "wan", "plain", {"slices": _with("wan", "condition_embedder", 1, ndim=None)}),
    ("slices", "wan", "token times", {"slices": _without("wan", "condition_embedder", 0)}),
    ("slices", "wan", "token times", {"slices": _without("wan", "condition_embedder", 1)}),
    ("slices", "wan", "plain", {"slices": (*_F["wan"].slices, Slice("positions", 0, 0, "image"))}),
    ("layers_keys", "flux", "plain", {"layers_keys": ("num_layers",)}),
    ("layers_keys", "wan", "plain", {"layers_keys": ("depth",)}),
    ("embed", "flux", "plain", {"embed": Embed("context_embedder", 1)}),
    ("embed", "flux", "plain", {"embed": Embed("x_embedder", 2)}),
    ("embed", "sd3", "plain", {"embed": Embed("pos_embed", 2)}),
    ("embed", "pixart", "plain", {"embed": Embed("pos_embed.proj", 1)}),
    ("embed", "wan", "plain", {"embed": Embed("patch_embedding", 1)}),
    ("embed", "qwenimage", "plain", {"embed": Embed("txt_in", 1)}),
    ("once", "flux", "plain", {"per_step": ("x_embedder",)}),
    ("once", "flux", "plain", {"per_step": ("transformer_blocks.*.ff",)}),
    ("once", "flux", "plain", {"per_request": ("time_text_embed",)}),
    ("once", "sd3", "plain", {"per_step": ("blocks.*.norm1.linear",)}),
    ("once", "pixart", "plain", {"per_request": ("transformer_blocks.*.attn2.to_q",)}),
    ("once", "pixart", "plain", {"per_request": ("adaln_single",)}),
    ("once", "qwenimage", "plain", {"per_step": ("text_embedding",)}),
    ("once", "wan", "plain", {"per_request": ("condition_embedder",)}),
    ("text", "flux", "plain", {"text": ("ff",)}),
    ("text", "sd3", "plain", {"text": ("attn.to_q",)}),
    ("text", "qwenimage", "plain", {"text": ("txt_norm3",)}),
    ("text", "qwenimage", "plain", {"not_empty": ("apply_rotary",)}),
    ("heads_key", "flux", "plain", {"heads_key": "attention_head_dim"}),
    ("heads_key", "wan", "plain", {"heads_key": "num_heads"}),
    ("processors", "flux", "plain", {"processors": ("JointAttnProcessor2_0",)}),
    ("processors", "flux", "plain", {"processors": ("FluxAttnProcessor", "AttnProcessor3_0")}),
    ("processors", "flux", "plain", {"processors": ("FluxAttnProcessor", "JointAttnProcessor2_0")}),
    ("processors", "pixart", "plain", {"processors": ("AttnProcessor2_0", "AttnProcessor")}),
]


def _name(lie: tuple[str, str, str, dict[str, Any]]) -> str:
    claim, family, variant, changes = lie
    return f"{claim}-{family}-{variant}-{'+'.join(changes)}".replace(" ", "_")


@pytest.mark.parametrize(("claim", "family", "variant", "changes"), LIES, ids=map(_name, LIES))
def test_a_false_record_fails_its_own_check(claim: str, family: str, variant: str, changes: dict[str, Any]) -> None:
    subject = _subject(family, variant)
    result = _only(prove(replace(subject, family=replace(subject.family, **changes))), claim)
    assert len(result.detail) > 20


def test_every_check_was_seen_failing() -> None:
    on_models = {"stages", "masks", "paths"}
    assert {lie[0] for lie in LIES} | on_models == {claim.name for claim in CLAIMS}


# Claims that no field of a record states are tested on models made wrong.


def _broken(family: str, variant: str, break_it: Callable[[Any], None]) -> list[Result]:
    record = FAMILIES[family]
    chosen = next(v for v in variants(record) if v.name == variant)
    pipe = chosen.build(record)
    break_it(pipe.transformer)
    return prove(Subject.of(record, chosen, pipe))


def test_a_path_past_the_streams_fails_the_stages_check() -> None:
    def long_skip(transformer: Any) -> None:
        seen: list[torch.Tensor] = []
        hooks = Hooks()
        hooks.after(transformer.transformer_blocks[0], lambda output: seen.append(output[1]))
        hooks.before(transformer.norm_out, lambda given: {**given, "x": given["x"] + seen[-1]})

    assert "more than streams" in _only(_broken("sd3", "plain", long_skip), "stages").detail


@pytest.mark.parametrize(
    ("family", "mask"), [("pixart", "encoder_attention_mask"), ("qwenimage", "encoder_hidden_states_mask")]
)
def test_an_ignored_mask_fails_the_masks_check(family: str, mask: str) -> None:
    def ignore(transformer: Any) -> None:
        for block in transformer.transformer_blocks:
            Hooks().before(block, lambda given: {**given, mask: None})

    assert "masked text tokens" in _only(_broken(family, "masked", ignore), "masks").detail


def test_a_path_of_no_weight_fails_the_paths_check() -> None:
    def fade(transformer: Any) -> None:
        for block in transformer.transformer_blocks:
            block.attn1.to_out[0].weight.data *= 1e-4
            block.attn1.to_out[0].bias.data *= 1e-4

    assert "attn1" in _only(_broken("pixart", "plain", fade), "paths").detail


def test_a_report_prints_and_travels_as_json() -> None:
    false = Result("joint", "plain", "false", "text token 3 stands in row [3]")
    report = Report("flux", "FluxTransformer2DModel", (Result("blocks", "plain", "proved", "4 blocks"), false))
    assert not report.ok and report.false == (false,)
    assert "joint   FALSE" in str(report) and "text token 3" in str(report)
    assert report.to_json()["results"][1]["status"] == "false"


def test_a_transformer_class_names_its_family_too() -> None:
    assert conform("PixArtTransformer2DModel", "plain").ok


def test_an_unknown_name_points_to_the_guide() -> None:
    with pytest.raises(ModelError, match=r"NoSuchModel.*docs/adding-a-family\.md"):
        conform("NoSuchModel")


def test_an_unknown_variant_names_the_known_ones() -> None:
    with pytest.raises(ModelError, match="no variant wings; its variants are plain, dual attention"):
        conform("sd3", "wings")


def test_the_command_prints_a_table() -> None:
    command = [sys.executable, "-m", "ditpar.conformance"]
    done = subprocess.run([*command, "pixart", "--variant", "masked"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "slices" in done.stdout and "every claim is proved" in done.stdout
    unknown = subprocess.run([*command, "NoSuch"], capture_output=True, text=True, timeout=120)
    assert unknown.returncode == 3 and "adding-a-family" in unknown.stderr


def test_proofs_leave_the_model_as_it_was() -> None:
    subject = _subject("flux", "plain")
    want = subject.calls[0].run()
    prove(subject)
    transformer = subject.pipe.transformer
    assert torch.equal(subject.calls[0].run(), want)
    assert "encode_prompt" not in vars(subject.pipe)
    for module in transformer.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks and "forward" not in vars(module)


def test_a_record_without_variants_is_built_plainly() -> None:
    record: Family = replace(FAMILIES["pixart"], name="newcomer")
    report = conform(record)
    assert report.ok and {r.variant for r in report.results} == {"plain"}
