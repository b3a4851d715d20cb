"""Stock conventions under PipeFusion: callbacks, interrupts, generators, short and changing requests, and no leftovers."""

from __future__ import annotations

import threading
import time
from typing import Any

import diffusers
import pytest
import torch
from naive import Naive
from parity import distance
from world import Worlds

import ditpar
from ditpar.conformance import tiny
from ditpar.errors import PlanError, RequestError
from ditpar.family import families
from ditpar.stage.program import Kind

FLUX, SD3, PIXART, WAN = (families()[name] for name in ("flux", "sd3", "pixart", "wan"))
EXACT = 1e-5
PLAN = "pipe=2,patches=3"
WHOLE = "pipe=2,warmup=99"


def run(pipe: Any, call: dict[str, Any], seed: int = 3) -> Any:
    return pipe(**{**call, "generator": torch.Generator().manual_seed(seed)})[0]


def requested(family: Any, plan: str, extra: Any = None, pipeline: str | None = None, **options: Any) -> dict[str, Any]:
    """A request under a plan, against stock when all steps are whole, else against the one worked out by hand.

    `extra(pipe, log)` gives further arguments of the call for a pipeline; what it logs must be the same on both.
    """
    logs: list[list[Any]] = [[], []]
    pipe, other = (tiny.build(family, pipeline) for _ in range(2))
    ditpar.parallelize(pipe, plan)
    engine, units = pipe._ditpar, []
    run_unit = engine.calls._run_unit
    engine.calls._run_unit = lambda call, peer, unit: (run_unit(call, peer, unit), units.append(unit))
    call = tiny.inputs(family, pipe, **options)
    got = run(pipe, {**call, **(extra(pipe, logs[0]) if extra else {})})
    patched = [u for u in units if u.kind is Kind.PATCH]
    bands = [u.rows for u in patched if u.run == patched[0].run] if patched else []
    call = {**tiny.inputs(family, other, **options), **(extra(other, logs[1]) if extra else {})}
    if patched:
        with Naive(family, bands, engine.plan.warmup).on(other.transformer):
            want = run(other, call)
    else:
        want = run(other, call)
    alike = len(logs[0]) == len(logs[1]) and all(
        distance(a, b) <= EXACT if isinstance(a, torch.Tensor) else a == b for a, b in zip(*logs, strict=True)
    )
    return {
        "error": distance(got, want),
        "alike": alike,
        "logged": len(logs[0]),
        "patched": len(patched),
        "runs": len({u.run for u in units}),
        "forced": dict(engine.forced),
    }


def reads(pipe: Any, log: list[Any]) -> dict[str, Any]:
    def callback(given: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        assert given is pipe and type(tensors["latents"]) is torch.Tensor
        log.append(torch.from_numpy(tensors["latents"].numpy().copy()))
        return {}

    return {"callback_on_step_end": callback}


def edits(pipe: Any, log: list[Any]) -> dict[str, Any]:
    def callback(_: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step == 1:
            tensors["latents"].mul_(0.9)
        return {"latents": tensors["latents"] * 1.1} if step == 2 else {}

    return {"callback_on_step_end": callback}


def edits_latents_alone(pipe: Any, log: list[Any]) -> dict[str, Any]:
    def callback(_: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        return {"latents": tensors["latents"] * 1.1} if step == 2 else {}

    return {"callback_on_step_end": callback, "callback_on_step_end_tensor_inputs": ["latents", "prompt_embeds"]}


def edits_text(pipe: Any, log: list[Any]) -> dict[str, Any]:
    def callback(_: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step == 1:
            tensors["prompt_embeds"].mul_(0.3)
        return {}

    return {"callback_on_step_end": callback, "callback_on_step_end_tensor_inputs": ["latents", "prompt_embeds"]}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    ("plan", "extra"), [(PLAN, edits_latents_alone), (WHOLE, edits_latents_alone), (WHOLE, edits_text)]
)
def test_callbacks_that_are_given_the_text(plan: str, extra: Any, inference: bool, worlds: Worlds) -> None:
    for error in worlds(2).run(given_the_text, plan, extra.__name__, inference):
        assert error <= EXACT


def given_the_text(plan: str, extra: str, inference: bool) -> float:
    with torch.inference_mode(inference):
        return float(requested(FLUX, plan, globals()[extra], steps=5, size=(64, 64))["error"])


def skips(plan: str, layer: int) -> Any:
    """SD3 with skip-layer guidance: a second call in a step, of other latents."""
    try:
        extra = {"skip_guidance_layers": [layer], "skip_layer_guidance_stop": 0.9}
        found = requested(SD3, plan, lambda *_: extra, steps=6, size=(64, 64))
        return found["error"], found["patched"]
    except PlanError as error:
        return str(error)


@pytest.mark.parametrize("plan", ["pipe=2,split=1/2,patches=2,warmup=2", "pipe=2,split=1/2,warmup=99"])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_calls_that_skip_layers(plan: str, layer: int, worlds: Worlds) -> None:
    for error, patched in worlds(2).run(skips, plan, layer):
        # Each of the last four steps has two bands, and so have two more calls with guidance by skipped layers.
        assert error <= EXACT if "99" in plan else patched > 0


def test_calls_that_skip_the_last_stage(worlds: Worlds) -> None:
    for message in worlds(2).run(skips, "pipe=2,split=2/1,patches=2", 2):
        assert "leaves out all blocks of the last stage" in message


def counts(pipe: Any, log: list[Any]) -> dict[str, Any]:
    def callback(_: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        log.append(step)
        return {}

    return {"callback_on_step_end": callback, "callback_on_step_end_tensor_inputs": []}


def previews(pipe: Any, log: list[Any]) -> dict[str, Any]:
    return {"callback": lambda step, timestep, latents: log.append(latents.clone()), "callback_steps": 2}


@pytest.mark.parametrize("plan", [PLAN, WHOLE])
@pytest.mark.parametrize(
    ("family", "extra", "logged"),
    [(FLUX, reads, 5), (SD3, reads, 5), (FLUX, edits, 0), (SD3, edits, 0), (FLUX, counts, 5), (PIXART, previews, 3)],
    ids=lambda x: getattr(x, "name", getattr(x, "__name__", str(x))),
)
def test_callbacks(family: Any, extra: Any, logged: int, plan: str, worlds: Worlds) -> None:
    for found in worlds(2).run(requested, family, plan, extra, steps=5, size=(64, 64)):
        assert found["error"] <= EXACT and found["alike"] and found["logged"] == logged, found


def test_a_callback_that_asks_for_no_tensors_does_not_drain_the_pipeline(worlds: Worlds) -> None:
    for found in worlds(2).run(requested, FLUX, PLAN, counts, steps=5, size=(64, 64)):
        assert found["logged"] == 5 and not found["forced"]


def edits_unasked() -> str:
    pipe = ditpar.parallelize(tiny.build(FLUX), PLAN)
    callback = {"callback_on_step_end": lambda *_: {"latents": 1}, "callback_on_step_end_tensor_inputs": []}
    try:
        run(pipe, {**tiny.inputs(FLUX, pipe, size=(64, 64)), **callback})
    except RequestError as error:
        return str(error)
    return ""


def test_such_a_callback_can_edit_nothing(worlds: Worlds) -> None:
    assert all("tensor_inputs is empty" in message for message in worlds(2).run(edits_unasked))


def cutoff(pipe: Any, log: list[Any]) -> dict[str, Any]:
    kind = "SD3CFGCutoffCallback" if "3" in type(pipe).__name__ else "SDCFGCutoffCallback"
    return {"callback_on_step_end": getattr(diffusers.callbacks, kind)(cutoff_step_index=2, cutoff_step_ratio=None)}


@pytest.mark.parametrize("plan", [PLAN, WHOLE])
def test_guidance_that_stops_half_way_makes_a_whole_step(plan: str, worlds: Worlds) -> None:
    for found in worlds(2).run(stops_guidance, plan):
        assert found["error"] <= EXACT, found
        assert found["whole"] == (2 if plan == PLAN else 6) and found["patched"] == (4 if plan == PLAN else 0)


def stops_guidance(plan: str) -> dict[str, Any]:
    """SD3 with its own callback that drops the unconditional branch after two steps: the batch changes."""
    outputs, calls = [], None
    for bound in (False, True):
        pipe = tiny.build(SD3)
        call = {**tiny.inputs(SD3, pipe, steps=6, size=(64, 64)), **cutoff(pipe, [])}
        if bound:
            ditpar.parallelize(pipe, plan)
            calls = pipe._ditpar.calls
            outputs.append(run(pipe, call))
        elif plan == WHOLE:
            outputs.append(run(pipe, call))
        else:
            with Naive(SD3, _bands(SD3, plan), 1).on(pipe.transformer):
                outputs.append(run(pipe, call))
    return {"error": distance(*reversed(outputs)), "whole": calls.synchronous, "patched": calls.patched}


def _bands(family: Any, plan: str) -> list[tuple[int, int]]:
    pipe = ditpar.parallelize(tiny.build(family), plan)
    seen: list[Any] = []
    run_unit = pipe._ditpar.calls._run_unit
    pipe._ditpar.calls._run_unit = lambda call, peer, unit: (run_unit(call, peer, unit), seen.append(unit))
    run(pipe, tiny.inputs(family, pipe, steps=2, size=(64, 64)))
    patched = [u for u in seen if u.kind is Kind.PATCH]
    return [u.rows for u in patched if u.run == patched[0].run]


def strengths(pipeline: str, family: Any, plan: str) -> dict[str, Any]:
    return requested(family, plan, None, pipeline, steps=6, size=(64, 64), strength=0.5)


@pytest.mark.parametrize("plan", [PLAN, WHOLE])
@pytest.mark.parametrize(
    ("family", "pipeline"), [(FLUX, "FluxImg2ImgPipeline"), (SD3, "StableDiffusion3Img2ImgPipeline")]
)
def test_strength_shortens_the_loop(family: Any, pipeline: str, plan: str, worlds: Worlds) -> None:
    for found in worlds(2).run(strengths, pipeline, family, plan):
        assert found["error"] <= EXACT and found["runs"] in (3, 6), found


@pytest.mark.parametrize("family", [FLUX, SD3, PIXART], ids=lambda f: f.name)
def test_fewer_steps_than_the_warm_up_are_exact(family: Any, worlds: Worlds) -> None:
    for found in worlds(2).run(requested, family, "pipe=2,patches=2,warmup=4", steps=3, size=(64, 64)):
        assert found["error"] <= EXACT and found["patched"] == 0


@pytest.mark.parametrize("family", [FLUX, SD3, PIXART], ids=lambda f: f.name)
@pytest.mark.parametrize("size", [(80, 112), (112, 80)], ids=str)
def test_rows_that_do_not_divide(family: Any, size: tuple[int, int], worlds: Worlds) -> None:
    for plan in ("pipe=2,patches=4", WHOLE):
        for found in worlds(2).run(requested, family, plan, steps=4, size=size):
            assert found["error"] <= EXACT


def batches(family: Any, plan: str) -> float:
    """Three images from a list of generators, against stock or by hand."""
    results = []
    bands = [] if plan == WHOLE else _bands(family, plan)
    for bound in (False, True):
        pipe = tiny.build(family)
        call = tiny.inputs(family, pipe, steps=4, size=(64, 64), batch=3)
        call["generator"] = [torch.Generator().manual_seed(s) for s in (5, 6, 7)]
        if bound:
            ditpar.parallelize(pipe, plan)
            results.append(pipe(**call)[0])
        elif plan == WHOLE:
            results.append(pipe(**call)[0])
        else:
            with Naive(family, bands, 1).on(pipe.transformer):
                results.append(pipe(**call)[0])
    assert results[0].shape[0] == 3
    return distance(results[1], results[0])


@pytest.mark.parametrize("plan", [PLAN, WHOLE])
@pytest.mark.parametrize("family", [FLUX, SD3, PIXART], ids=lambda f: f.name)
def test_batches_and_lists_of_generators(family: Any, plan: str, worlds: Worlds) -> None:
    assert max(worlds(2).run(batches, family, plan)) <= EXACT


# -- hybrids -----------------------------------------------------------------------------------------------------------


def planned(family: Any, plan: str, steps: int = 4) -> torch.Tensor:
    pipe = ditpar.parallelize(tiny.build(family), plan)
    frames = {"num_frames": 17} if family is WAN else {}
    return run(pipe, tiny.inputs(family, pipe, steps=steps, size=(64, 64), **frames))


@pytest.mark.parametrize("family", [FLUX, SD3, PIXART, WAN], ids=lambda f: f.name)
@pytest.mark.parametrize("axis", ["ulysses", "ring", "cfg"])
def test_a_hybrid_gives_the_image_of_the_pipeline_alone(family: Any, axis: str, worlds: Worlds) -> None:
    """Over 24 tokens or more, where bands of both plans are alike."""
    plan = "pipe=2,patches=2,warmup=2"
    alone = worlds(2).run(planned, family, plan)
    for image in worlds(4).run(planned, family, f"{plan},{axis}=2"):
        assert distance(image, alone[0]) <= EXACT


def test_eight_ranks(worlds: Worlds) -> None:
    alone = worlds(2).run(planned, FLUX, "pipe=2,patches=2", 3)
    for image in worlds(8).run(planned, FLUX, "pipe=2,cfg=2,ulysses=2,patches=2", 3):
        assert distance(image, alone[0]) <= EXACT


def guided_for_a_while(plan: str) -> torch.Tensor:
    """Wan, whose guidance a callback ends after three steps: from then on one call a step is left."""

    def callback(pipe: Any, step: int, *_: Any) -> dict[str, Any]:
        if step == 2:
            pipe._guidance_scale = 1.0
        return {}

    pipe = ditpar.parallelize(tiny.build(WAN), plan)
    call = tiny.inputs(WAN, pipe, steps=6, size=(64, 64), num_frames=13)
    return run(pipe, {**call, "callback_on_step_end": callback})


@pytest.mark.parametrize("options", ["patches=2", "warmup=99"])
def test_a_branch_that_is_left_alone_has_a_state_on_all_ranks(options: str, worlds: Worlds) -> None:
    alone = worlds(2).run(guided_for_a_while, f"pipe=2,{options}")
    images = worlds(4).run(guided_for_a_while, f"cfg=2,pipe=2,{options}")
    for image in images:  # the call left alone goes as a whole once, where some ranks have no state
        assert distance(image, images[0]) == 0 and distance(image, alone[0]) <= (0.1 if "patches" in options else EXACT)


# -- interrupts --------------------------------------------------------------------------------------------------------


def interrupted(at: int) -> tuple[int, float]:
    """A callback stops the request; the latents are those of stock, and the next request is whole."""

    def extra(pipe: Any, log: list[Any]) -> dict[str, Any]:
        def callback(_: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            log.append(step)
            if step == at:
                pipe._interrupt = True
            return {}

        return {"callback_on_step_end": callback}

    found = requested(FLUX, PLAN, extra, steps=5, size=(64, 64))
    assert found["alike"] and found["logged"] == at + 1
    return found["error"]


@pytest.mark.parametrize("at", range(4))
def test_a_callback_interrupts_at_any_step(at: int, worlds: Worlds) -> None:
    assert max(worlds(2).run(interrupted, at)) <= EXACT


def from_another_thread() -> tuple[int, float]:
    import torch.distributed as dist

    pipe = ditpar.parallelize(tiny.build(FLUX), PLAN)
    call = tiny.inputs(FLUX, pipe, steps=60, size=(64, 64))
    want = run(pipe, {**call, "num_inference_steps": 4})
    steps: list[float] = []
    pipe._ditpar.on_step = lambda: steps.append(time.monotonic())

    def stop() -> None:
        while len(steps) < 5:
            time.sleep(0.001)
        pipe._interrupt = True

    if dist.get_rank() == 1:
        thread = threading.Thread(target=stop)
        thread.start()
    run(pipe, call)
    count = len(steps)
    return count, distance(run(pipe, {**call, "num_inference_steps": 4}), want)


def test_another_thread_interrupts_all_ranks_at_the_same_step(worlds: Worlds) -> None:
    (a, error), (b, other) = worlds(2).run(from_another_thread)
    assert a == b < 50 and error == other == 0


# -- nothing is left ---------------------------------------------------------------------------------------------------


class Stop(Exception):
    pass


def disturbed(how: str) -> bool:
    """Whether a request gives the same bits after another one that failed, was stopped, or had another size."""
    pipe = ditpar.parallelize(tiny.build(FLUX), PLAN)
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


@pytest.mark.parametrize("how", ["fails", "fails lazily", "stops", "is larger"])
def test_no_request_sees_another_ones_state(how: str, worlds: Worlds) -> None:
    assert worlds(2).run(disturbed, how) == [True, True]
    assert worlds(3).run(disturbed_3, how) == [True] * 3


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
@pytest.mark.parametrize("at", [0, 2, 3, 6, 7])
def test_a_call_that_fails_leaves_nothing_unnoticed(at: int, transport: str, worlds: Worlds) -> None:
    for message, found in worlds(2).run(fails_inside_over, at, transport):
        assert "call ditpar.parallelize again" in message
        assert found == "" if transport == "shared" else "start the ranks again" in found


def fails_inside_over(at: int, transport: str) -> tuple[str, str]:
    import os

    before = os.environ.get("DITPAR_TRANSPORT")
    os.environ["DITPAR_TRANSPORT"] = transport
    try:
        return fails_inside(at, "pipe=2,patches=2")
    finally:
        os.environ.pop("DITPAR_TRANSPORT")
        if before is not None:
            os.environ["DITPAR_TRANSPORT"] = before


def disturbed_3(how: str) -> bool:
    global PLAN
    before, PLAN = PLAN, "pipe=3,patches=4"
    try:
        return disturbed(how)
    finally:
        PLAN = before


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


def too_many() -> str:
    try:
        ditpar.parallelize(tiny.build(PIXART), "pipe=4")
    except PlanError as error:
        return str(error)
    return ""


def test_more_stages_than_blocks(worlds: Worlds) -> None:
    assert all("use pipe=3 at most" in message for message in worlds(4).run(too_many))
