"""Only instances change, and all of it can be undone: `parallelize` without other ranks, and what it leaves alone."""

import copy
import inspect
import pickle
import sys

import diffusers
import pytest
import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry

import ditpar
from ditpar.conformance import tiny
from ditpar.errors import ModelError, PlanError, RequestError
from ditpar.family import families

FAMILIES = families()
LIBRARIES = ("torch", "diffusers", "transformers", "accelerate")


def snapshot():
    """The state of the libraries: every attribute of every module and class, by identity, and process-wide settings."""
    state = {}
    for name, module in list(sys.modules.items()):
        if module is None or name.partition(".")[0] not in LIBRARIES:
            continue
        for key, value in list(vars(module).items()):
            state[name, key] = value
            if isinstance(value, type) and value.__module__ == name:
                state.update({(name, key, k): v for k, v in vars(value).items()})
    settings = {
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "backend": _AttentionBackendRegistry._active_backend,
        "matmul": torch.get_float32_matmul_precision(),
    }
    return state, settings


def changes(before):
    state, settings = snapshot()
    ignored = {"__warningregistry__", "__annotations_cache__", "_abc_impl", "__dict__", "__weakref__"}
    return [
        key for key, value in before[0].items() if key[-1] not in ignored and key in state and state[key] is not value
    ] + [key for key, value in before[1].items() if settings[key] != value]


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request):
    return FAMILIES[request.param]


def test_one_rank_and_restore_are_bit_equal_and_touch_no_library(family):
    pipe = tiny.build(family)
    want = pipe(**tiny.inputs(family, pipe))[0]
    stock = type(pipe)
    attributes = {k: id(v) for k, v in vars(pipe).items()}
    before = snapshot()
    assert ditpar.parallelize(pipe, "single") is pipe
    assert torch.equal(pipe(**tiny.inputs(family, pipe))[0], want)
    assert isinstance(pipe, stock) and type(pipe).__name__ == stock.__name__
    assert inspect.signature(pipe.__call__) == inspect.signature(stock(**pipe.components).__call__)
    assert ditpar.restore(pipe) is pipe
    assert type(pipe) is stock and {k: id(v) for k, v in vars(pipe).items()} == attributes
    assert torch.equal(pipe(**tiny.inputs(family, pipe))[0], want)
    assert changes(before) == []


def test_the_comparison_of_library_state_notices_changes():
    before = snapshot()
    original = torch.nn.functional.silu
    try:
        torch.nn.functional.silu = lambda x: x  # what ditpar must never do
        diffusers.FluxPipeline.made_up = 1
        diffusers.FluxPipeline.__doc__, doc = "other", diffusers.FluxPipeline.__doc__
        assert ("torch.nn.functional", "silu") in changes(before)
        assert any(key[-1] == "__doc__" for key in changes(before))
    finally:
        torch.nn.functional.silu = original
        diffusers.FluxPipeline.__doc__ = doc
        del diffusers.FluxPipeline.made_up
    assert changes(before) == []


def test_plans_that_need_ranks_are_refused_without_them():
    pipe = tiny.build(FAMILIES["flux"])
    with pytest.raises(PlanError, match="needs 2 ranks but there are 1; plan single works"):
        ditpar.parallelize(pipe, "cfg=2")
    assert type(pipe) is diffusers.FluxPipeline and "_ditpar" not in vars(pipe)
    ditpar.parallelize(pipe, "auto")


def test_pipelines_without_a_known_transformer_are_refused():
    pipe = tiny.build(FAMILIES["flux"])
    pipe.transformer = torch.nn.Linear(2, 2)
    with pytest.raises(ModelError, match=r"Linear.*adding-a-family"):
        ditpar.parallelize(pipe, "single")


def test_copies_and_pickles_are_stock():
    pipe = ditpar.parallelize(tiny.build(FAMILIES["flux"]), "single")
    for other in (copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
        assert type(other) is diffusers.FluxPipeline and "_ditpar" not in vars(other)
        call = tiny.inputs(FAMILIES["flux"], pipe)
        assert torch.equal(other(**copy.deepcopy(call))[0], pipe(**tiny.inputs(FAMILIES["flux"], pipe))[0])
    assert type(diffusers.FluxImg2ImgPipeline.from_pipe(pipe)) is diffusers.FluxImg2ImgPipeline


def test_save_pretrained_writes_a_stock_pipeline(tmp_path):
    pipe = ditpar.parallelize(tiny.build(FAMILIES["flux"]), "single")
    pipe.save_pretrained(tmp_path)
    other = diffusers.DiffusionPipeline.from_pretrained(
        tmp_path, text_encoder=None, text_encoder_2=None, tokenizer=None, tokenizer_2=None
    )
    assert type(other) is diffusers.FluxPipeline
    other.set_progress_bar_config(disable=True)
    call = lambda: tiny.inputs(FAMILIES["flux"], pipe)  # noqa: E731
    # Weights read from a file lie elsewhere in memory, which may change the order of sums.
    torch.testing.assert_close(other(**call())[0], pipe(**call())[0], rtol=1e-5, atol=1e-5)


def test_a_second_request_inside_the_first_is_refused():
    pipe = ditpar.parallelize(tiny.build(FAMILIES["flux"]), "single")
    call = tiny.inputs(FAMILIES["flux"], pipe)

    def again(*_):
        pipe(**call)

    with pytest.raises(RequestError, match="already serving"):
        pipe(**call, callback_on_step_end=again)
    pipe(**tiny.inputs(FAMILIES["flux"], pipe))
