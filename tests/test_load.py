"""`ditpar.load` in one ordinary process is used like the diffusers pipeline: every convention, against stock."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from parity import distance
from test_conventions import lora_state

import ditpar
from ditpar.errors import GangError, ModelError, PlanError, RequestError
from ditpar.gang.modelfolder import DEFAULT_MODEL, defaults

PROMPT = "red apple"
SHORT: dict[str, Any] = {"num_inference_steps": 2}
DEFAULTS = {**defaults(DEFAULT_MODEL), **SHORT}


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


def seeded(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_signature_and_name(pipe: Any, stock: Any) -> None:
    assert inspect.signature(pipe) == inspect.signature(stock)
    assert inspect.signature(pipe.__call__) == inspect.signature(stock.__call__)
    assert type(pipe).__name__ == "FluxPipeline" and pipe.__call__.__doc__ == stock.__call__.__doc__


@pytest.mark.parametrize("output_type", ["pil", "np", "pt", "latent"])
def test_output_types(pipe: Any, stock: Any, output_type: str) -> None:
    got = pipe(PROMPT, generator=seeded(), output_type=output_type, **SHORT)
    want = stock(PROMPT, generator=seeded(), output_type=output_type, **DEFAULTS)
    assert type(got) is type(want)
    as_tensor = lambda x: torch.as_tensor(np.stack([np.asarray(i, dtype=np.float64) for i in x]))  # noqa: E731
    assert type(got.images[0]) is type(want.images[0])
    assert distance(as_tensor(got.images), as_tensor(want.images)) <= (5e-3 if output_type == "pil" else 1e-5)


def test_return_dict_false_gives_a_tuple(pipe: Any) -> None:
    out = pipe(PROMPT, generator=1, return_dict=False, output_type="latent", **SHORT)
    assert isinstance(out, tuple) and out[0].shape == (1, 256, 32)


def test_the_models_defaults_fill_in_and_yield_to_what_is_given(pipe: Any) -> None:
    steps: list[int] = []
    short = pipe(
        PROMPT, generator=1, callback_on_step_end=lambda *a: steps.append(a[1]) or {}, output_type="latent"
    ).images
    assert len(steps) == 24
    unguided = pipe(PROMPT, generator=1, output_type="latent", true_cfg_scale=1.5).images
    assert distance(short, unguided) > 1e-3


def test_generators_advance_as_in_a_single_run(pipe: Any, stock: Any) -> None:
    mine, theirs = seeded(9), seeded(9)
    for _ in range(2):
        got = pipe(PROMPT, generator=mine, output_type="latent", **SHORT).images
        want = stock(PROMPT, generator=theirs, output_type="latent", **DEFAULTS).images
        assert distance(got, want) <= 1e-5 and torch.equal(mine.get_state(), theirs.get_state())
    torch.manual_seed(3)
    got, after = pipe(PROMPT, output_type="latent", **SHORT).images, torch.get_rng_state()
    torch.manual_seed(3)
    want = stock(PROMPT, output_type="latent", **DEFAULTS).images
    assert distance(got, want) <= 1e-5 and torch.equal(after, torch.get_rng_state())
    assert torch.equal(
        pipe(PROMPT, generator=4, output_type="latent", **SHORT).images,
        pipe(PROMPT, generator=seeded(4), output_type="latent", **SHORT).images,
    )


def test_a_list_of_generators(pipe: Any, stock: Any) -> None:
    two = lambda: [seeded(1), seeded(2)]  # noqa: E731
    got = pipe([PROMPT, "castle"], generator=two(), output_type="latent", negative_prompt=["", ""], **SHORT).images
    want = stock(
        [PROMPT, "castle"], generator=two(), output_type="latent", **{**DEFAULTS, "negative_prompt": ["", ""]}
    ).images
    assert distance(got, want) <= 1e-5
    with pytest.raises(ValueError, match="list of generators"):
        pipe(PROMPT, generator=two(), **SHORT)


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


def test_a_callback_cannot_use_the_pipeline(pipe: Any) -> None:
    def again(*_: Any) -> None:
        pipe(PROMPT)

    with pytest.raises(RequestError, match="middle of this thread's own request"):
        pipe(PROMPT, generator=1, callback_on_step_end=again, **SHORT)
    pipe(PROMPT, generator=1, output_type="latent", **SHORT)


def test_scheduler_swap(pipe: Any, stock: Any) -> None:
    before = pipe.scheduler
    swapped = diffusers.FlowMatchEulerDiscreteScheduler.from_config(before.config, shift=3.0)
    try:
        pipe.scheduler = stock.scheduler = swapped
        got = pipe(PROMPT, generator=seeded(), output_type="latent", **SHORT).images
        assert distance(got, stock(PROMPT, generator=seeded(), output_type="latent", **DEFAULTS).images) <= 1e-5
    finally:
        pipe.scheduler = stock.scheduler = before


def test_lora(pipe: Any, stock: Any, tmp_path: Any) -> None:
    run = lambda p: p(PROMPT, generator=seeded(), output_type="latent", **DEFAULTS).images  # noqa: E731
    before = run(pipe)
    state = lora_state(stock)
    stock.load_lora_weights(state, adapter_name="a")
    stock.save_lora_weights(
        tmp_path, transformer_lora_layers={k.removeprefix("transformer."): v for k, v in state.items()}
    )
    want = run(stock)
    stock.set_adapters("a", 0.5)
    half = run(stock)
    stock.unload_lora_weights()

    pipe.load_lora_weights(tmp_path, adapter_name="a")
    assert distance(run(pipe), want) <= 1e-5 and distance(want, before) > 1e-3
    pipe.set_adapters("a", 0.5)
    assert distance(run(pipe), half) <= 1e-5
    assert pipe.get_active_adapters() == ["a"]
    pipe.unload_lora_weights()
    assert torch.equal(run(pipe), before)


def test_a_lora_that_matches_nothing_is_an_error(pipe: Any) -> None:
    nothing = {
        "transformer.no_such.to_q.lora_A.weight": torch.zeros(2, 4),
        "transformer.no_such.to_q.lora_B.weight": torch.zeros(4, 2),
    }
    with pytest.raises((RequestError, ValueError), match="no layer|Target modules|no_such"):
        pipe.load_lora_weights(nothing, adapter_name="x")
    pipe(PROMPT, generator=1, output_type="latent", **SHORT)


def test_attributes_methods_and_saving(pipe: Any, stock: Any, tmp_path: Any) -> None:
    assert pipe.vae_scale_factor == stock.vae_scale_factor
    assert pipe.transformer.config["num_layers"] == stock.transformer.config["num_layers"]
    assert pipe.dtype == torch.float32 and pipe.device == torch.device("cpu") and pipe.to("cpu") is pipe
    with pytest.raises(RequestError, match="cuda"):
        pipe.to("cuda")
    with pytest.raises(AttributeError, match="made_up"):
        _ = pipe.made_up
    with pytest.raises(AttributeError, match="made_up"):
        pipe.made_up = 1
    pipe.save_pretrained(tmp_path / "copy")
    assert (tmp_path / "copy" / "transformer" / "diffusion_pytorch_model.safetensors").stat().st_size > 1 << 20
    assert {"rank", "pid", "rss"} == set(pipe.memory()[0]) and len(pipe.memory()) == 2


def test_the_pipelines_own_errors_leave_the_gang_alive(pipe: Any) -> None:
    pids = [m["pid"] for m in pipe.memory()]
    with pytest.raises(ValueError, match="has to be of type"):
        pipe(3, **SHORT)
    with pytest.raises(TypeError, match="num_steps"):
        pipe(PROMPT, num_steps=3)
    with pytest.raises(PlanError, match="true_cfg_scale above 1"):
        pipe(PROMPT, true_cfg_scale=1.0, **SHORT)
    assert [m["pid"] for m in pipe.memory()] == pids


def test_two_threads_are_served_in_turn(pipe: Any) -> None:
    alone = [pipe(PROMPT, generator=s, output_type="latent", **SHORT).images for s in (1, 2)]
    got: dict[int, torch.Tensor] = {}

    def run(seed: int) -> None:
        got[seed] = pipe(PROMPT, generator=seed, output_type="latent", **SHORT).images

    threads = [threading.Thread(target=run, args=(s,)) for s in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(torch.equal(got[s], alone[s - 1]) for s in (1, 2))


def test_auto_plans_each_call() -> None:
    with ditpar.load(DEFAULT_MODEL, ranks=2) as pipe:
        pipe.set_progress_bar_config(disable=True)
        assert pipe.plan is None
        pipe(PROMPT, generator=1, **SHORT)
        assert pipe._plan_for({"prompt": PROMPT, **DEFAULTS}) == "cfg=2"
        one = pipe(PROMPT, generator=1, true_cfg_scale=1.0, output_type="latent", **SHORT).images
        assert pipe._plan_for({"prompt": PROMPT, "true_cfg_scale": 1.0}) == "ulysses=2"
    with ditpar.load(DEFAULT_MODEL) as single:
        single.set_progress_bar_config(disable=True)
        two = single(PROMPT, generator=1, true_cfg_scale=1.0, output_type="latent", **SHORT).images
    assert distance(one, two) <= 1e-5
    with pytest.raises(GangError, match="closed"):
        single(PROMPT)


@pytest.mark.parametrize(
    ("kwargs", "error", "words"),
    [
        ({"plan": "cfg=2", "ranks": 3}, PlanError, "needs 2 ranks but there are 3"),
        ({"plan": "pipe=2"}, PlanError, "not built yet"),
        ({"plan": "ulysses=8"}, PlanError, "4 attention heads"),
        ({"ranks": 0}, PlanError, "ranks=0"),
        ({"plan": "sideways=2"}, PlanError, "sideways"),
    ],
)
def test_impossible_plans_are_refused_before_anything_starts(kwargs: dict[str, Any], error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        ditpar.load(DEFAULT_MODEL, **kwargs)


def test_models_that_cannot_be_used() -> None:
    for name in ("/no/such/folder", "nobody-at-all"):
        with pytest.raises(ModelError, match="no folder"):
            ditpar.load(name)
    with pytest.raises(ModelError, match="neither a folder nor a model"):
        ditpar.load("nobody/nothing")
