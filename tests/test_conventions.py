"""What diffusers users rely on holds under a plan, on every rank: callbacks, interrupts, random state, LoRA, and so on."""

from __future__ import annotations

import os
from typing import Any

import diffusers
import pytest
import torch
import torch.distributed as dist
from parity import distance
from world import RankError, Worlds

import ditpar
from ditpar.conformance import tiny
from ditpar.errors import PlanError, RequestError
from ditpar.family import families

FLUX, SD3, PIXART = (families()[name] for name in ("flux", "sd3", "pixart"))
EXACT = 1e-5


def both(plan: str, family=FLUX, prepare=None, **options: Any):
    """The same call stock and under a plan, on two pipelines alike: (pipe, outputs stock, outputs planned)."""
    outputs, pipes = [], []
    for bound in (False, True):
        pipe = tiny.build(family)
        if bound:
            ditpar.parallelize(pipe, plan)
        extra = prepare(pipe) if prepare else {}
        outputs.append(pipe(**{**tiny.inputs(family, pipe, **options), **extra}))
        pipes.append(pipe)
    return pipes[1], outputs[0][0], outputs[1][0]


def edits_latents(plan: str) -> list[float]:
    seen: list[list[torch.Tensor]] = [[], []]

    def prepare(pipe):
        mine = seen["_ditpar" in vars(pipe)]

        def callback(given, step, timestep, tensors):
            assert given is pipe
            mine.append(tensors["latents"].clone())
            return {"latents": tensors["latents"] * 0.9} if step == 0 else {}

        return {"callback_on_step_end": callback}

    _, want, got = both(plan, prepare=prepare, steps=3)
    assert len(seen[0]) == len(seen[1]) == 3
    return [distance(got, want), *(distance(b, a) for a, b in zip(*seen, strict=True))]


def edits_on_rank_0_only() -> float:
    def prepare(pipe):
        def callback(_, step, timestep, tensors):
            if dist.get_rank() == 0 or "_ditpar" not in vars(pipe):
                tensors["latents"].mul_(0.9)
            return tensors

        return {"callback_on_step_end": callback}

    _, want, got = both("ulysses=2", prepare=prepare)
    return distance(got, want)


@pytest.mark.parametrize("plan", ["ulysses=2", "cfg=2"])
def test_a_callback_sees_and_edits_true_latents(plan: str, worlds: Worlds) -> None:
    for distances in worlds(2).run(edits_latents, plan):
        assert max(distances) <= EXACT


def test_what_rank_0s_callback_edits_holds_on_all_ranks(worlds: Worlds) -> None:
    assert max(worlds(2).run(edits_on_rank_0_only)) <= EXACT


def pipeline_callback() -> float:
    class Halve(diffusers.callbacks.PipelineCallback):
        tensor_inputs = ("latents",)

        def callback_fn(self, pipeline, step_index, timestep, tensors):
            return {"latents": tensors["latents"] / 2}

    _, want, got = both("ulysses=2", prepare=lambda pipe: {"callback_on_step_end": Halve(None, 0)})
    return distance(got, want)


def test_a_pipeline_callback_object_names_its_tensors(worlds: Worlds) -> None:
    assert max(worlds(2).run(pipeline_callback)) <= EXACT


def interrupted(rank: int) -> tuple[int, float]:
    steps = []

    def prepare(pipe):
        def callback(_, step, timestep, tensors):
            if "_ditpar" in vars(pipe):
                steps.append(step)
            if step == 1 and ("_ditpar" not in vars(pipe) or dist.get_rank() == rank):
                pipe._interrupt = True
            return tensors

        return {"callback_on_step_end": callback}

    pipe, want, got = both("cfg=2", prepare=prepare, steps=5)
    assert distance(pipe(**tiny.inputs(FLUX, pipe))[0], both("cfg=2")[1]) <= EXACT  # the next request is whole
    return len(steps), distance(got, want)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_interrupt_on_any_rank_stops_all_at_the_same_step(rank: int, worlds: Worlds) -> None:
    for steps, error in worlds(2).run(interrupted, rank):
        assert steps == 2 and error <= EXACT


def random_state() -> None:
    rank = dist.get_rank()
    pipe = tiny.build(FLUX)
    stock, planned = torch.Generator().manual_seed(7), torch.Generator().manual_seed(7 + 100 * rank)
    call = {**tiny.inputs(FLUX, pipe), "generator": stock}
    want = pipe(**call)[0]
    ditpar.parallelize(pipe, "ulysses=2")
    assert distance(pipe(**{**call, "generator": planned})[0], want) <= EXACT
    assert torch.equal(stock.get_state(), planned.get_state())
    torch.manual_seed(11 + 100 * rank)
    got = pipe(**{**call, "generator": None})[0]
    after = torch.get_rng_state()
    ditpar.restore(pipe)
    torch.manual_seed(11)
    assert distance(got, pipe(**{**call, "generator": None})[0]) <= EXACT
    assert torch.equal(after, torch.get_rng_state())
    many = {**tiny.inputs(FLUX, pipe, batch=2)}
    seeds = lambda: [torch.Generator().manual_seed(s) for s in (1, 2)]  # noqa: E731
    want = pipe(**{**many, "generator": seeds()})[0]
    ditpar.parallelize(pipe, "data=2")
    assert distance(pipe(**{**many, "generator": seeds()})[0], want) <= EXACT


def test_random_state_is_rank_0s_and_advances_as_in_a_single_run(worlds: Worlds) -> None:
    worlds(2).run(random_state)


def different_arguments() -> str:
    pipe = ditpar.parallelize(tiny.build(FLUX), "ulysses=2")
    try:
        pipe(**tiny.inputs(FLUX, pipe, steps=2 + dist.get_rank()))
    except RequestError as error:
        return str(error)
    return ""


def test_different_arguments_on_ranks_are_an_error_on_all(worlds: Worlds) -> None:
    first, second = worlds(2).run(different_arguments)
    assert "different arguments" in first and "num_inference_steps" in second


def swapped_scheduler() -> float:
    def prepare(pipe):
        pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_config(pipe.scheduler.config)
        return {}

    _, want, got = both("cfg=2", families()["wan"], prepare, steps=3)
    return distance(got, want)


def test_a_scheduler_swap_after_parallelize(worlds: Worlds) -> None:
    assert max(worlds(2).run(swapped_scheduler)) <= EXACT


def lora_state(pipe: Any, rank: int = 2) -> dict[str, torch.Tensor]:
    """A random LoRA on the attention projections of all blocks, as a state dict for `load_lora_weights`."""
    random = torch.Generator().manual_seed(3)
    state = {}
    for name, module in pipe.transformer.named_modules():
        if name.endswith((".to_q", ".to_v")):
            shapes = {"A": (rank, module.in_features), "B": (module.out_features, rank)}
            for key, shape in shapes.items():
                state[f"transformer.{name}.lora_{key}.weight"] = torch.randn(shape, generator=random) * 0.5
    return state


def lora(plan: str) -> dict[str, float]:
    pipe = tiny.build(FLUX)
    plain = pipe(**tiny.inputs(FLUX, pipe))[0]
    pipe.load_lora_weights(lora_state(pipe), adapter_name="a")
    want = pipe(**tiny.inputs(FLUX, pipe))[0]
    pipe.unload_lora_weights()
    ditpar.parallelize(pipe, plan)
    before = pipe(**tiny.inputs(FLUX, pipe))[0]
    pipe.load_lora_weights(lora_state(pipe), adapter_name="a")
    result = {"loaded": distance(pipe(**tiny.inputs(FLUX, pipe))[0], want), "moved": distance(want, plain)}
    pipe.set_adapters("a", 0.5)
    half = pipe(**tiny.inputs(FLUX, pipe))[0]
    result["weight"] = min(distance(half, want), distance(half, plain))
    pipe.unload_lora_weights()
    result["unloaded"] = float(torch.equal(pipe(**tiny.inputs(FLUX, pipe))[0], before))
    return result


@pytest.mark.parametrize("plan", ["ulysses=2", "cfg=2"])
def test_lora_after_parallelize(plan: str, worlds: Worlds) -> None:
    for result in worlds(2).run(lora, plan):
        assert (
            result["loaded"] <= EXACT and result["moved"] > 1e-3 and result["weight"] > 1e-3 and result["unloaded"] == 1
        )


def fused_projections(name: str) -> float:
    family = families()[name]

    def prepare(pipe):
        pipe.transformer.fuse_qkv_projections()
        return {}

    _, want, got = both("ring=2", family, prepare)
    return distance(got, want)


@pytest.mark.parametrize("name", ["flux", "sd3"])
def test_projections_fused_after_parallelize(name: str, worlds: Worlds) -> None:
    assert max(worlds(2).run(fused_projections, name)) <= EXACT


def skipped_layers() -> float:
    _, want, got = both(
        "cfg=2", SD3, lambda pipe: {"skip_guidance_layers": [0, 1], "skip_layer_guidance_stop": 1.0}, steps=4
    )
    return distance(got, want)


def test_skip_layer_guidance_makes_a_third_call(worlds: Worlds) -> None:
    assert max(worlds(2).run(skipped_layers)) <= EXACT


def refused(kind: str) -> str:
    pipe = tiny.build(FLUX)
    plan = "ring=2" if kind == "backend" else "ulysses=2"
    try:
        if kind == "compiled before":
            pipe.transformer.compile()
        ditpar.parallelize(pipe, plan)
        call = tiny.inputs(FLUX, pipe)
        if kind == "compiled after":
            pipe.transformer.compile()
        elif kind == "cache":
            pipe.transformer.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.1))
        elif kind == "hook":
            config = diffusers.FirstBlockCacheConfig(threshold=0.1)
            diffusers.hooks.apply_first_block_cache(pipe.transformer, config)
        elif kind == "processor":

            class Mine(type(pipe.transformer.transformer_blocks[0].attn.processor)):
                pass

            pipe.transformer.transformer_blocks[1].attn.set_processor(Mine())
        elif kind == "adapter tensors":
            call["joint_attention_kwargs"] = {"ip_adapter_image_embeds": [torch.zeros(1, 2)]}
        elif kind == "backend":
            pipe.transformer.transformer_blocks[0].attn.processor._attention_backend = "sage"
        elif kind == "too few tokens":
            call.update(height=16, width=16)
        elif kind == "no guidance":
            ditpar.parallelize(pipe, "cfg=2")
            call["true_cfg_scale"] = 1.0
        pipe(**call)
    except PlanError as error:
        return str(error)
    return "ran"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("compiled before", "compile_repeated_blocks"),
        ("compiled after", "compile_repeated_blocks"),
        ("cache", "disable_cache"),
        ("hook", "the stateful hook FBCHeadBlockHook"),
        ("processor", "transformer_blocks.1.attn has attention processor Mine"),
        ("adapter tensors", "joint_attention_kwargs"),
        ("backend", "attention backend sage"),
        ("too few tokens", "1 image tokens cannot be shared by 2"),
        ("no guidance", "true_cfg_scale above 1"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name_on_all_ranks(kind: str, words: str, worlds: Worlds) -> None:
    for message in worlds(2).run(refused, kind):
        assert words in message


def shared_by_rank_0() -> tuple[bool, float, bool]:
    pipe = tiny.build(FLUX)
    call = lambda: tiny.inputs(FLUX, pipe, output_type="pt")  # noqa: E731
    want = pipe(**call()).images
    ditpar.parallelize(pipe, "ulysses=2,components=rank0")
    dropped = next(pipe.vae.parameters()).device.type == "meta"
    got = pipe(**call()).images
    ditpar.restore(pipe)
    return dropped, distance(got, want), torch.equal(pipe(**call()).images, want)


def test_components_of_rank_0_alone_and_back(worlds: Worlds) -> None:
    results = worlds(2).run(shared_by_rank_0)
    assert [dropped for dropped, _, _ in results] == [False, True]
    assert max(error for _, error, _ in results) <= EXACT and all(same for _, _, same in results)


def a_component_that_fails() -> str:
    pipe = ditpar.parallelize(tiny.build(FLUX), "ulysses=2")
    if dist.get_rank() == 0:
        pipe.vae.decode = None
    try:
        pipe(**tiny.inputs(FLUX, pipe, output_type="pt"))
    except TypeError as error:
        return str(error)
    return "ran"


def test_an_error_in_a_component_on_rank_0_is_raised_on_all(worlds: Worlds) -> None:
    assert all("NoneType" in message for message in worlds(2).run(a_component_that_fails))


def over_gloo(plan: str) -> tuple[float, bool]:
    os.environ["DITPAR_TRANSPORT"] = "gloo"
    try:
        pipe, want, got = both(plan)
    finally:
        del os.environ["DITPAR_TRANSPORT"]
    return distance(got, want), pipe._ditpar.mesh.sequence.channels is None


def test_without_shared_memory_gloo_carries_the_messages(worlds: Worlds) -> None:
    for error, without in worlds(3).run(over_gloo, "ulysses=3"):
        assert error <= EXACT and without


def library_state(plan: str) -> list[Any]:
    from test_instances import changes, snapshot

    import ditpar.engine.parallel

    pipe = tiny.build(FLUX)
    pipe(**tiny.inputs(FLUX, pipe))
    before = snapshot()
    ditpar.parallelize(pipe, plan)
    inside: list[Any] = []

    def callback(*_):
        with torch.enable_grad():  # the stock pipeline itself runs without
            inside.extend(changes(before))
        return {}

    pipe(**tiny.inputs(FLUX, pipe), callback_on_step_end=callback)
    return inside + changes(before)


@pytest.mark.parametrize("plan", ["ulysses=2", "ring=2", "cfg=2"])
def test_no_library_state_changes_even_during_a_request(plan: str, worlds: Worlds) -> None:
    for changed in worlds(2).run(library_state, plan):
        # torch.distributed counts its groups and messages in its own module.
        assert [key for key in changed if not str(key[0]).startswith("torch.distributed")] == []


def test_a_rank_that_is_alone_in_raising_is_reported(worlds: Worlds) -> None:
    with pytest.raises(RankError, match="rank 1"):
        worlds(2).run(raises_on_rank_1, timeout=20)


def raises_on_rank_1() -> None:
    pipe = ditpar.parallelize(tiny.build(FLUX), "ulysses=2")

    def callback(_, step, timestep, tensors):
        if dist.get_rank() == 1:
            raise ValueError("on purpose")
        return tensors

    pipe(**tiny.inputs(FLUX, pipe), callback_on_step_end=callback)
