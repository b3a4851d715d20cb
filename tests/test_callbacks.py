"""Callbacks and interrupts through `ditpar.load`: they run in the caller's process as a stock pipeline's do."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from typing import Any

import diffusers
import pytest
import torch
from diffusers.callbacks import PipelineCallback
from parity import distance
from test_load import DEFAULTS, PROMPT, SHORT, seeded

import ditpar
from ditpar.errors import RequestError
from ditpar.gang.modelfolder import DEFAULT_MODEL


@pytest.fixture(scope="module")
def pipe() -> Iterator[Any]:
    with ditpar.load(DEFAULT_MODEL, plan="cfg=2") as loaded:
        loaded.set_progress_bar_config(disable=True)
        yield loaded


@pytest.fixture(scope="module")
def stock() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = diffusers.DiffusionPipeline.from_pretrained(DEFAULT_MODEL, torch_dtype=torch.float32)
    loaded.set_progress_bar_config(disable=True)
    return loaded


def test_callbacks_run_here_and_may_edit(pipe: Any, stock: Any) -> None:
    def edit(given: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        assert threading.current_thread() is threading.main_thread()
        seen.append((given, step, float(timestep), tensors["latents"].shape))
        if step == 0:
            return {"latents": tensors["latents"] * 0.5}
        tensors["latents"].add_(0.1)
        return tensors

    results = []
    for each in (pipe, stock):
        seen: list[Any] = []
        results.append(
            each(PROMPT, generator=seeded(), callback_on_step_end=edit, output_type="latent", **DEFAULTS).images
        )
        assert [s[0] is each for s in seen] == [True, True]
        results.append(torch.tensor([s[2] for s in seen]))
    assert distance(results[0], results[2]) <= 1e-5 and torch.equal(results[1], results[3])


def test_a_callback_can_interrupt(pipe: Any) -> None:
    steps: list[int] = []

    def stop(given: Any, step: int, *_: Any) -> dict[str, Any]:
        steps.append(step)
        if step == 1:
            given._interrupt = True
        return {}

    pipe(PROMPT, generator=1, callback_on_step_end=stop, output_type="latent")
    assert steps == [0, 1]
    assert not pipe(PROMPT, generator=1, output_type="latent", **SHORT).images.isnan().any()


def test_another_thread_can_interrupt(pipe: Any) -> None:
    steps: list[int] = []
    running = threading.Event()

    def count(_: Any, step: int, *__: Any) -> dict[str, Any]:
        steps.append(step)
        running.set()
        return {}

    def stop() -> None:
        running.wait(20)
        pipe._interrupt = True

    thread = threading.Thread(target=stop)
    thread.start()
    pipe(PROMPT, generator=1, num_inference_steps=200, callback_on_step_end=count, output_type="latent")
    thread.join()
    assert 0 < len(steps) < 150


def test_a_callback_may_use_the_pipeline_as_stock_callbacks_do(pipe: Any, stock: Any) -> None:
    """Reads properties and the scheduler, switches guidance off, decodes a preview, draws random numbers."""

    def callback(given: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        sigmas = given.scheduler.sigmas
        latents = (
            tensors["latents"] + 0.01 * torch.randn(tensors["latents"].shape) + 0.01 * torch.randn(1, generator=own)
        )
        unpacked = given._unpack_latents(latents, 64, 64, given.vae_scale_factor)
        preview = given.vae.decode(unpacked / given.vae.config.scaling_factor, return_dict=False)[0]
        seen.append((given.num_timesteps, float(sigmas[step]), given.guidance_scale, preview.detach()))
        given._guidance_scale = 7.0 + step
        return {"latents": latents}

    results = []
    for each in (pipe, stock):
        seen: list[Any] = []
        own = seeded()
        torch.manual_seed(11)
        call = {**DEFAULTS, "height": 64, "width": 64, "num_inference_steps": 3}
        out = each(PROMPT, generator=own, callback_on_step_end=callback, output_type="latent", **call).images
        results.append((out, seen, torch.get_rng_state(), own.get_state()))
    (got, mine, *states), (want, theirs, *stock_states) = results
    assert distance(got, want) <= 1e-5 and all(map(torch.equal, states, stock_states))
    assert [m[:3] for m in mine] == [t[:3] for t in theirs] and [m[2] for m in mine] == [3.5, 7.0, 8.0]
    assert max(distance(m[3], t[3]) for m, t in zip(mine, theirs, strict=True)) <= 1e-5


def test_an_edit_in_place_needs_no_return(pipe: Any, stock: Any) -> None:
    def edit(_: Any, step: int, __: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        tensors["latents"].mul_(0.5)
        return {}

    run = lambda p: p(PROMPT, generator=seeded(), callback_on_step_end=edit, output_type="latent", **DEFAULTS).images  # noqa: E731
    assert distance(run(pipe), run(stock)) <= 1e-5


def test_a_pipeline_callback_says_what_it_wants(pipe: Any, stock: Any) -> None:
    class Halve(PipelineCallback):
        tensor_inputs = ("latents", "prompt_embeds")

        def callback_fn(self, pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            assert set(tensors) == {"latents", "prompt_embeds"}
            return {"prompt_embeds": tensors["prompt_embeds"] * 0.5}

    halve = Halve(cutoff_step_ratio=None, cutoff_step_index=0)
    call = {"generator": 3, "callback_on_step_end": halve, "output_type": "latent"}
    got = pipe(PROMPT, **call, **DEFAULTS).images
    told = {"generator": seeded(3), "callback_on_step_end_tensor_inputs": list(Halve.tensor_inputs)}
    assert distance(got, stock(PROMPT, **{**call, **told}, **DEFAULTS).images) <= 1e-5


def test_a_callback_cannot_start_a_request_and_its_error_is_the_callers(pipe: Any) -> None:
    pids = [m["pid"] for m in pipe.memory()]
    mine = LookupError("mine")

    def again(given: Any, *_: Any) -> None:
        given(PROMPT)

    def wrong(*_: Any) -> None:
        raise mine

    def unsendable(*_: Any) -> dict[str, Any]:
        return {"latents": lambda: 0}

    with pytest.raises(RequestError, match="a callback cannot start another request"):
        pipe(PROMPT, generator=1, callback_on_step_end=again, **SHORT)
    with pytest.raises(LookupError) as caught:
        pipe(PROMPT, generator=1, callback_on_step_end=wrong, **SHORT)
    assert caught.value is mine
    with pytest.raises(RequestError, match="callback_on_step_end returned what cannot be sent"):
        pipe(PROMPT, generator=1, callback_on_step_end=unsendable, **SHORT)
    pipe(PROMPT, generator=1, output_type="latent", **SHORT)
    assert [m["pid"] for m in pipe.memory()] == pids
