"""`ditpar.load` in one ordinary process is used like the diffusers pipeline: every convention, against stock."""

from __future__ import annotations

import inspect
import io
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
    small = {"generator": 1, "output_type": "latent", "height": 64, "width": 64}
    plain = pipe(PROMPT, callback_on_step_end=lambda *a: steps.append(a[1]) or {}, **small).images
    assert len(steps) == 24 and plain.shape == (1, 16, 32)
    for given in ({"true_cfg_scale": 1.5}, {"max_sequence_length": 8}, {"negative_prompt": "pizza"}):
        assert distance(plain, pipe(PROMPT, **given, **small).images) > 1e-3
    embeds = dict(zip(("prompt_embeds", "pooled_prompt_embeds"), pipe.encode_prompt(PROMPT, PROMPT), strict=False))
    negative = {f"negative_{name}": value for name, value in embeds.items()}
    pipe(**embeds, **negative, **small, **SHORT)  # to which no default text is added


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


def test_the_progress_bar_is_drawn_here(pipe: Any) -> None:
    file = io.StringIO()
    pipe.set_progress_bar_config(file=file, desc="painting", ncols=60)
    pipe(PROMPT, generator=1, num_inference_steps=3, output_type="latent")
    assert "painting: 100%" in file.getvalue() and "3/3" in file.getvalue()
    pipe.set_progress_bar_config(disable=True)
    pipe(PROMPT, generator=1, output_type="latent", **SHORT)
    assert "2/2" not in file.getvalue()


def test_scheduler_swap(pipe: Any, stock: Any) -> None:
    before = pipe.scheduler
    swapped = diffusers.FlowMatchEulerDiscreteScheduler.from_config(before.config, shift=3.0)
    run = lambda p: p(PROMPT, generator=seeded(), output_type="latent", **DEFAULTS).images  # noqa: E731
    plain = run(pipe)
    try:
        pipe.scheduler = stock.scheduler = swapped
        got, want = run(pipe), run(stock)
        assert distance(got, want) <= 1e-5 and distance(got, plain) > 1e-3
        assert pipe.scheduler is swapped and torch.equal(pipe.scheduler.sigmas, stock.scheduler.sigmas)
        pipe.scheduler.set_shift(6.0)  # changed, not replaced
        assert distance(run(pipe), run(stock)) <= 1e-5 and distance(run(pipe), got) > 1e-3
    finally:
        pipe.scheduler = stock.scheduler = before
    assert torch.equal(run(pipe), plain)


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


def test_attributes(pipe: Any, stock: Any) -> None:
    assert isinstance(pipe, diffusers.FluxPipeline)
    assert pipe.vae_scale_factor == stock.vae_scale_factor and pipe.name_or_path == str(DEFAULT_MODEL)
    assert {(k, tuple(v)) for k, v in pipe.config.items() if k[0] != "_"} == {
        (k, tuple(v)) for k, v in stock.config.items() if k[0] != "_"
    }
    assert pipe.transformer.config["num_layers"] == stock.transformer.config["num_layers"]
    assert pipe.dtype == torch.float32 and pipe.device == torch.device("cpu")
    assert pipe.to("cpu") is pipe and pipe.to(torch.float32) is pipe
    for wanted in ("cuda", torch.bfloat16):
        with pytest.raises(RequestError, match=r"choose by ditpar.load"):
            pipe.to(wanted)
    with pytest.raises(RequestError, match="leave it out"):
        pipe.enable_model_cpu_offload()
    with pytest.raises(AttributeError, match="made_up"):
        _ = pipe.made_up
    with pytest.raises(AttributeError, match="made_up"):
        pipe.made_up = 1
    with pytest.raises(AttributeError, match="transformer cannot be set"):
        pipe.transformer = stock.transformer
    assert set(pipe.components) == set(stock.components) and pipe.components["image_encoder"] is None
    assert pipe.tokenizer("red apple").input_ids == stock.tokenizer("red apple").input_ids
    memory = pipe.memory()
    assert len(memory) == 2 and all(0 < m["pss"] <= m["rss"] for m in memory)


def test_methods_run_on_all_ranks_and_below_components(pipe: Any, stock: Any) -> None:
    got = pipe.encode_prompt(PROMPT, PROMPT, max_sequence_length=16)
    want = stock.encode_prompt(PROMPT, PROMPT, max_sequence_length=16)
    assert all(distance(g, w) <= 1e-5 for g, w in zip(got[:2], (w.detach() for w in want[:2]), strict=True))
    assert inspect.signature(pipe.encode_prompt) == inspect.signature(stock.encode_prompt)
    pipe.vae.enable_tiling()
    assert pipe.vae.use_tiling is True
    pipe.vae.use_tiling = False
    assert pipe.vae.use_tiling is False
    with pytest.raises(RequestError, match="pipe.transformer.parameters gives what cannot leave the ranks"):
        pipe.transformer.parameters()
    with pytest.raises(RequestError, match="cannot be sent to the ranks"):
        pipe.encode_prompt(lambda: "a local function")


def test_a_saved_copy_gives_the_same_bits(pipe: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a relative path is the caller's
    pipe.save_pretrained("copy")
    copy = diffusers.DiffusionPipeline.from_pretrained("copy", torch_dtype=torch.float32)
    copy.set_progress_bar_config(disable=True)
    assert type(copy) is diffusers.FluxPipeline
    state = copy.vae.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in pipe.vae.state_dict().items())
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        pipe.save_pretrained("file/below")


def test_other_threads_can_look_while_a_request_runs(pipe: Any) -> None:
    looked: list[Any] = []

    def callback(*_: Any) -> dict[str, Any]:
        thread = threading.Thread(
            target=lambda: looked.append((pipe.device, pipe.num_timesteps, pipe.scheduler.config.shift))
        )
        thread.start()
        thread.join(5)
        return {}

    pipe(PROMPT, generator=1, callback_on_step_end=callback, output_type="latent", **SHORT)
    assert looked == [(torch.device("cpu"), 2, pipe.scheduler.config.shift)] * 2


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
        ({"plan": "tensor=2"}, PlanError, "not built yet"),
        ({"plan": "ulysses=8"}, PlanError, "4 attention heads"),
        ({"ranks": 0}, PlanError, "ranks=0"),
        ({"plan": "sideways=2"}, PlanError, "sideways"),
    ],
)
def test_impossible_plans_are_refused_before_anything_starts(kwargs: dict[str, Any], error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        ditpar.load(DEFAULT_MODEL, **kwargs)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [({"threads": 0}, "threads=0"), ({"device": "tpu"}, "device='tpu'"), ({"device_map": "auto"}, "device_map")],
)
def test_other_arguments_that_cannot_be(kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        ditpar.load(DEFAULT_MODEL, **kwargs)


def test_from_pretrained_arguments_are_passed_on(tmp_path: Any) -> None:
    with ditpar.load(DEFAULT_MODEL, dtype=torch.bfloat16, text_encoder=None, tokenizer=None, device="cpu") as pipe:
        assert pipe.dtype == torch.bfloat16 and pipe.text_encoder is None
        assert pipe.transformer.dtype == torch.bfloat16


def test_names_that_are_no_models() -> None:
    for name in ("/no/such/folder", "nobody-at-all"):
        with pytest.raises(ModelError, match="no folder"):
            ditpar.load(name)
    with pytest.raises(ModelError, match="neither a folder nor a model"):
        ditpar.load("nobody/nothing")
