"""PipeFusion leaves nothing behind between requests, gives the stock pipeline back, and refuses what cannot be right."""

from __future__ import annotations

import os
from typing import Any

import diffusers
import pytest
import torch
from parity import distance
from test_pipe_requests import EXACT, FLUX, PIXART, PLAN, SD3, WAN, WHOLE, run
from world import Worlds

import ditpar
from ditpar.conformance import tiny
from ditpar.errors import PlanError, RequestError

# -- nothing is left ---------------------------------------------------------------------------------------------------


class Stop(Exception):
    pass


def disturbed(how: str, plan: str, transport: str) -> bool:
    os.environ["DITPAR_TRANSPORT"] = transport
    try:
        return undisturbed(how, plan)
    finally:
        del os.environ["DITPAR_TRANSPORT"]


def undisturbed(how: str, plan: str) -> bool:
    """Whether a request gives the same bits after another one that failed, was stopped, or had another size."""
    pipe = ditpar.parallelize(tiny.build(FLUX), plan)
    call = tiny.inputs(FLUX, pipe, steps=4, size=(64, 64))
    want = run(pipe, call)

    def callback(_: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step == 2:
            if how == "fails":
                raise Stop
            pipe._interrupt = True
        return {}

    other = {**call, "callback_on_step_end": callback}
    if how == "fails lazily":
        stock = pipe.scheduler.step
        times = iter(range(9))

        def step(*args: Any, **kwargs: Any) -> Any:
            if next(times) == 2:
                raise Stop
            return stock(*args, **kwargs)

        pipe.scheduler.step = step
        del other["callback_on_step_end"]
    if how == "is larger":
        other = tiny.inputs(FLUX, pipe, steps=3, size=(96, 64), text_tokens=11)
    try:
        run(pipe, other, seed=9)
        assert how in ("stops", "is larger")
    except Stop:
        assert how.startswith("fails")
    if how == "fails lazily":
        del pipe.scheduler.step
    return torch.equal(run(pipe, call), want)


@pytest.mark.parametrize("transport", ["shared", "gloo"])
@pytest.mark.parametrize("how", ["fails", "fails lazily", "stops", "is larger"])
def test_no_request_sees_another_ones_state(how: str, transport: str, worlds: Worlds) -> None:
    assert worlds(2).run(disturbed, how, PLAN, transport) == [True, True]
    assert worlds(3).run(disturbed, how, "pipe=3,patches=4", transport) == [True] * 3


def fails_inside(at: int, plan: str) -> tuple[str, str]:
    """A transformer call fails on all ranks alike: what the next request says, and whether a new plan is clean."""
    pipe = ditpar.parallelize(tiny.build(WAN), plan)
    call = tiny.inputs(WAN, pipe, steps=5, size=(64, 64), num_frames=13)
    want = run(pipe, call)
    times = iter(range(99))

    def hook(*_: Any) -> None:
        if next(times) == at:
            raise Stop

    handle = pipe.transformer.register_forward_pre_hook(hook)
    with pytest.raises(Stop):
        run(pipe, call, seed=9)
    handle.remove()
    try:
        run(pipe, call)
        message = ""
    except RequestError as error:
        message = str(error)
    try:
        ditpar.parallelize(pipe, plan)
    except PlanError as error:
        return message, str(error)
    return message, "" if torch.equal(run(pipe, call), want) else "differs"


@pytest.mark.parametrize("transport", ["shared", "gloo"])
@pytest.mark.parametrize(("at", "patches"), [(0, 2), (2, 2), (3, 2), (6, 2), (7, 2), (9, 4)])
def test_a_call_that_fails_leaves_nothing_unnoticed(at: int, patches: int, transport: str, worlds: Worlds) -> None:
    """The last: more is on its way around the ring than the first stage was ready for."""
    for message, found in worlds(2).run(fails_inside_over, at, patches, transport):
        assert "call ditpar.parallelize again" in message
        assert found == "" if transport == "shared" else "start the ranks again" in found


def fails_inside_over(at: int, patches: int, transport: str) -> tuple[str, str]:
    before = os.environ.get("DITPAR_TRANSPORT")
    os.environ["DITPAR_TRANSPORT"] = transport
    try:
        return fails_inside(at, f"pipe=2,patches={patches}")
    finally:
        os.environ.pop("DITPAR_TRANSPORT")
        if before is not None:
            os.environ["DITPAR_TRANSPORT"] = before


def modes(plan: str) -> list[bool]:
    """Whether gradients were recorded in blocks and in the result."""
    pipe = ditpar.parallelize(tiny.build(FLUX), plan)
    seen: list[bool] = []
    for block in pipe.transformer.transformer_blocks:
        block.register_forward_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    with torch.enable_grad():
        seen.append(run(pipe, tiny.inputs(FLUX, pipe, steps=3, size=(64, 64))).requires_grad)
    return seen


@pytest.mark.parametrize("plan", [PLAN, "cfg=2"])
def test_calls_that_run_after_the_stock_loop_record_no_gradients(plan: str, worlds: Worlds) -> None:
    for seen in worlds(2).run(modes, plan):
        assert not any(seen)
    assert sum(map(len, worlds(2).run(modes, plan))) > 6


def restored() -> bool:
    pipe = tiny.build(FLUX)
    call = tiny.inputs(FLUX, pipe, steps=3, size=(64, 64))
    want = run(pipe, call)
    ditpar.parallelize(pipe, PLAN)
    run(pipe, call)
    ditpar.restore(pipe)
    return torch.equal(run(pipe, call), want)


def test_restoring_gives_the_stock_pipeline_back(worlds: Worlds) -> None:
    assert worlds(2).run(restored) == [True, True]


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("pipe=2,warmup=0", "warmup=0 must be a whole number of at least 1"),
        ("patches=4", "patches=4 needs a stage pipeline"),
        ("cfg=2,warmup=2", "warmup=2 needs a stage pipeline"),
        ("pipe=2,split=a/b", "split='a/b' must be numbers of blocks"),
        ("pipe=2,patches=x", "patches=x must be a whole number"),
    ],
)
def test_plans_that_cannot_be(plan: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        ditpar.Plan.parse(plan)


def refused(plan: str, how: str) -> str:
    pipe = tiny.build(FLUX)
    if how == "offload":
        diffusers.hooks.apply_group_offloading(
            pipe.transformer, onload_device=torch.device("cpu"), offload_type="leaf_level"
        )
    try:
        ditpar.parallelize(pipe, plan)
        run(pipe, tiny.inputs(FLUX, pipe, size=(32, 32)))
    except PlanError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("plan", "how", "words"),
    [
        ("pipe=2,split=3/3", "", "add up to the model's 4 blocks; without it the split is 2/2"),
        ("pipe=2,split=4", "", "must be 2 numbers"),
        ("pipe=2,patches=9", "", "patches=9: the latents have 4 rows"),
        ("pipe=2", "offload", "offloaded"),
    ],
)
def test_plans_that_do_not_fit_the_model_or_request(plan: str, how: str, words: str, worlds: Worlds) -> None:
    for message in worlds(2).run(refused, plan, how):
        assert words in message, message


def swapped() -> str:
    pipe = ditpar.parallelize(tiny.build(FLUX), PLAN)
    pipe.transformer = tiny.build(FLUX, num_layers=3).transformer
    try:
        run(pipe, tiny.inputs(FLUX, pipe, size=(64, 64)))
    except PlanError as error:
        return str(error)
    return ""


def test_another_transformer_of_more_blocks(worlds: Worlds) -> None:
    assert all("has 5 blocks but had 4" in message for message in worlds(2).run(swapped))


def too_many() -> str:
    try:
        ditpar.parallelize(tiny.build(PIXART), "pipe=4")
    except PlanError as error:
        return str(error)
    return ""


def test_more_stages_than_blocks(worlds: Worlds) -> None:
    assert all("use pipe=3 at most" in message for message in worlds(4).run(too_many))


def perturbs_attention(plan: str) -> str:
    """SD3 with perturbed-attention guidance sets processors of its own once the request has begun."""
    pipe = ditpar.parallelize(tiny.build(SD3, "StableDiffusion3PAGPipeline", pag_applied_layers=["blocks.1"]), plan)
    try:
        run(pipe, tiny.inputs(SD3, pipe, size=(64, 64), pag_scale=2.0))
    except PlanError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("plan", [PLAN, "ulysses=2", "ring=2"])
def test_processors_set_during_a_request(plan: str, worlds: Worlds) -> None:
    for message in worlds(2).run(perturbs_attention, plan):
        assert "transformer_blocks.1.attn: its attention processor was set to PAG" in message


def shared_text() -> float:
    """Both branches given the same embedding object, told apart by their pooled embeddings alone."""
    outputs = []
    for same in (False, True):
        pipe = ditpar.parallelize(tiny.build(FLUX), "pipe=2,patches=2")
        call = tiny.inputs(FLUX, pipe, steps=5, size=(64, 64))
        text = call["prompt_embeds"]
        outputs.append(run(pipe, {**call, "negative_prompt_embeds": text if same else text.clone()}))
    return distance(*outputs)


def test_branches_of_one_text_have_states_of_their_own(worlds: Worlds) -> None:
    assert worlds(2).run(shared_text) == [0, 0]


def under_autocast(plan: str) -> str:
    pipe = ditpar.parallelize(tiny.build(FLUX), plan)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            run(pipe, tiny.inputs(FLUX, pipe, size=(64, 64)))
    except PlanError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("plan", [PLAN, "cfg=2"])
def test_autocast_is_refused(plan: str, worlds: Worlds) -> None:
    assert all("cannot be combined with torch.autocast" in message for message in worlds(2).run(under_autocast, plan))


def corrects(plan: str) -> float:
    """A callback that calls the transformer itself."""
    outputs = []
    for bound in (False, True):
        pipe = tiny.build(FLUX)
        if bound:
            ditpar.parallelize(pipe, plan)
        call = tiny.inputs(FLUX, pipe, steps=4, size=(64, 64))
        given = {
            "encoder_hidden_states": call["prompt_embeds"],
            "pooled_projections": call["pooled_prompt_embeds"],
            "img_ids": pipe._prepare_latent_image_ids(1, 4, 4, "cpu", torch.float32),
            "txt_ids": torch.zeros(7, 3),
            "return_dict": False,
        }

        def callback(pipe: Any, step: int, time: Any, tensors: dict[str, Any], given: Any = given) -> dict[str, Any]:
            (out,) = pipe.transformer(hidden_states=tensors["latents"], timestep=time.expand(1) / 1000, **given)
            return {"latents": tensors["latents"] + 0.1 * out}

        outputs.append(run(pipe, {**call, "callback_on_step_end": callback}))
    return distance(*outputs)


def test_a_callback_calls_the_transformer(worlds: Worlds) -> None:
    assert max(worlds(2).run(corrects, WHOLE)) <= EXACT


def thin(patches: int) -> str:
    pipe = ditpar.parallelize(tiny.build(FLUX), f"ulysses=2,pipe=2,patches={patches}")
    try:
        run(pipe, tiny.inputs(FLUX, pipe, steps=3, size=(80, 80)))
        return ""
    except PlanError as error:
        message = str(error)
    assert pipe._ditpar.calls._made == 0 and not pipe._ditpar.mesh.health.broken
    return message


def test_a_last_band_of_too_few_tokens_is_refused_before_any_call(worlds: Worlds) -> None:
    assert all("leaves 1 tokens for the last band" in message for message in worlds(4).run(thin, 13))
    assert worlds(4).run(thin, 4) == [""] * 4
