"""Stock conventions under PipeFusion: callbacks, interrupts, generators, short and changing requests, and no leftovers."""

from __future__ import annotations

import os
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
from ditpar.errors import PlanError
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


def disturbed(how: str, plan: str, transport: str) -> bool:
    """Whether a request gives the same bits after another one that failed, was stopped, or had another size."""
    os.environ["DITPAR_TRANSPORT"] = transport
    try:
        return undisturbed(how, plan)
    finally:
        del os.environ["DITPAR_TRANSPORT"]


def undisturbed(how: str, plan: str) -> bool:
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


def too_many() -> str:
    try:
        ditpar.parallelize(tiny.build(PIXART), "pipe=4")
    except PlanError as error:
        return str(error)
    return ""


def test_more_stages_than_blocks(worlds: Worlds) -> None:
    assert all("use pipe=3 at most" in message for message in worlds(4).run(too_many))
