"""Stages that are loaded alone: what is read, what it equals, LoRA on it, and the way back to a whole model."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity import distance
from test_conventions import lora_state
from world import Worlds

import ditpar
from ditpar.conformance import tiny
from ditpar.engine.partial import staying
from ditpar.errors import ModelError, PlanError
from ditpar.family import families

PLAN = "pipe=2,patches=2"
EXACT = 1e-5


def saved(family: Any, folder: Path, shard: str = "5GB") -> Any:
    pipe = tiny.build(family)
    pipe.transformer.save_pretrained(folder / "transformer", max_shard_size=shard)
    return pipe


@pytest.mark.parametrize("shard", ["5GB", "100KB"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(families()))
def test_a_stage_has_the_weights_of_the_whole(name: str, dtype: Any, shard: str, tmp_path: Path) -> None:
    family = families()[name]
    pipe = saved(family, tmp_path, shard)
    cls = type(pipe.transformer)
    whole = cls.from_pretrained(tmp_path / "transformer", torch_dtype=dtype or torch.float32)
    held: set[str] = set()
    for rank in (0, 1):
        stage = ditpar.load_stage(tmp_path, PLAN, torch_dtype=dtype, rank=rank)
        for key, value in stage.state_dict().items():
            if value.is_meta:
                assert any(key.startswith(f"{blocks}.") for blocks in family.blocks)
            else:
                held.add(key)
                want = whole.state_dict()[key]
                assert value.dtype == want.dtype and torch.equal(value, want), key
        for (key, mine), (_, theirs) in zip(stage.named_buffers(), whole.named_buffers(), strict=True):
            assert mine.is_meta or (mine.dtype == theirs.dtype and torch.equal(mine, theirs)), key
        assert sum(v.is_meta for v in stage.state_dict().values()) > 0
        assert stage.config == whole.config or dict(stage.config) | {"_name_or_path": ""} == dict(whole.config) | {
            "_name_or_path": ""
        }
    assert held == set(whole.state_dict())


def test_other_stages_weights_are_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(families()["flux"], tmp_path)
    read: list[str] = []
    import ditpar.engine.partial as partial

    class Counting:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.file = safe_open(*args, **kwargs)

        def __enter__(self) -> Any:
            self.file.__enter__()
            return self

        def __exit__(self, *args: Any) -> None:
            self.file.__exit__(*args)

        def keys(self) -> Any:
            return self.file.keys()

        def get_tensor(self, name: str) -> torch.Tensor:
            read.append(name)
            return self.file.get_tensor(name)

    safe_open = partial.safe_open
    monkeypatch.setattr(partial, "safe_open", Counting)
    ditpar.load_stage(tmp_path, PLAN, rank=0)
    assert any(n.startswith("transformer_blocks.1.") for n in read)
    assert not any(n.startswith("single_transformer_blocks.") for n in read)


def staged(lora: bool) -> dict[str, Any]:
    """A pipeline whose ranks hold a stage each, against one that is whole under the same plan."""
    family = families()["flux"]
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, 0)
    if dist.get_rank() == 0:
        saved(family, Path(folder[0]))
    dist.barrier()
    whole, pipe = tiny.build(family), tiny.build(family)
    state = lora_state(whole)
    whole.transformer = type(whole.transformer).from_pretrained(Path(folder[0]) / "transformer")
    pipe.transformer = ditpar.load_stage(folder[0], PLAN)
    call = lambda p: p(**tiny.inputs(family, p, steps=4, size=(64, 64)))[0]  # noqa: E731
    found: dict[str, Any] = {}
    plain = call(whole)
    ditpar.parallelize(whole, PLAN)
    ditpar.parallelize(pipe, PLAN)
    before = call(whole)
    found["plain"] = distance(call(pipe), before)
    if lora:
        for p in (whole, pipe):
            p.load_lora_weights(state, adapter_name="a")
        want = call(whole)
        found["moved"] = distance(want, before)
        found["lora"] = distance(call(pipe), want)
        for p in (whole, pipe):
            p.unload_lora_weights()
        found["unloaded"] = distance(call(pipe), before)
    try:
        pipe.transformer.save_pretrained(f"{folder[0]}/again")
    except PlanError as error:
        found["save"] = str(error)
    try:
        ditpar.parallelize(pipe, "ulysses=2")
    except PlanError as error:
        found["other plan"] = str(error)
    ditpar.parallelize(pipe, PLAN)
    found["again"] = distance(call(pipe), before)
    ditpar.restore(pipe)
    found["restored"] = torch.equal(call(pipe), plain)
    return found


@pytest.mark.parametrize("lora", [False, True], ids=["plain", "LoRA"])
def test_stages_loaded_alone_work_as_those_of_a_whole_model(lora: bool, worlds: Worlds) -> None:
    for found in worlds(2).run(staged, lora):
        assert max(found["plain"], found["again"]) <= EXACT and found["restored"], found
        assert "call ditpar.restore first" in found["save"] and "ditpar.restore first" in found["other plan"]
        if lora:
            assert found["moved"] > 1e-3 and found["lora"] <= EXACT and found["unloaded"] <= EXACT, found


def test_moving_a_model_can_leave_other_stages_where_they_are() -> None:
    family = families()["flux"]
    model = tiny.build(family).transformer
    with staying(family, model, ditpar.Plan.parse(PLAN), 1):
        model.to(torch.float64)
    there = {name for name, p in model.named_parameters() if p.dtype == torch.float64}
    assert not any(name.startswith("transformer_blocks.") for name in there)
    assert all(n in there for n, _ in model.named_parameters() if not n.startswith("transformer_blocks."))
    model.to(torch.float64)
    assert all(p.dtype == torch.float64 for p in model.parameters())


def test_what_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    saved(families()["flux"], tmp_path)
    with pytest.raises(PlanError, match="has no stages"):
        ditpar.load_stage(tmp_path, "ulysses=2", rank=0)
    config = tmp_path / "transformer" / "config.json"
    good = json.loads(config.read_text())
    config.write_text(json.dumps(good | {"quantization_config": {}}))
    with pytest.raises(ModelError, match="quantised"):
        ditpar.load_stage(tmp_path, PLAN, rank=0)
    config.write_text(json.dumps(good))
    os.remove(tmp_path / "transformer" / "diffusion_pytorch_model.safetensors")
    with pytest.raises(ModelError, match="has neither"):
        ditpar.load_stage(tmp_path, PLAN, rank=0)
