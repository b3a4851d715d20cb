"""Bytes and messages per transformer call equal the formulas of docs/methods.md, for each method."""

from __future__ import annotations

import os

import pytest
import torch
from world import Worlds

import ditpar
from ditpar.conformance import tiny
from ditpar.family import families

STEPS, LAYERS, WIDTH, ELEMENT = 2, 4, 64, 4
IMAGE, TEXT, CHANNELS = 32, 8, 16
TOKENS = IMAGE + TEXT


def counted(plan: str) -> dict[str, tuple[int, int]]:
    """Per method, the bytes and messages that this rank sent in one request of the tiny Flux model."""
    family = families()["flux"]
    pipe = ditpar.parallelize(tiny.build(family), plan)
    cfg = "cfg" in plan
    pipe(**tiny.inputs(family, pipe, size=(128, 64), steps=STEPS, cfg=cfg, text_tokens=TEXT))
    return {name: (count.bytes, count.messages) for name, count in pipe._ditpar.mesh.counters.items()}


@pytest.mark.parametrize("n", [2, 4])
def test_ulysses_sends_4_n1_nn_x_a_layer(n: int, worlds: Worlds) -> None:
    for sent in worlds(n).run(counted, f"ulysses={n}"):
        assert sent["ulysses"] == (
            STEPS * LAYERS * 4 * (n - 1) * TOKENS * WIDTH * ELEMENT // n**2,
            STEPS * LAYERS * 2 * (n - 1),
        )
        assert sent["sequence"] == (STEPS * (n - 1) * IMAGE * CHANNELS * ELEMENT // n, STEPS * (n - 1))
        assert set(sent) <= {"ulysses", "sequence", "control", "components"}


@pytest.mark.parametrize("n", [2, 4])
def test_ring_sends_2_n1_n_x_a_layer(n: int, worlds: Worlds) -> None:
    for sent in worlds(n).run(counted, f"ring={n}"):
        assert sent["ring"] == (
            STEPS * LAYERS * 2 * (n - 1) * TOKENS * WIDTH * ELEMENT // n,
            STEPS * LAYERS * (n - 1),
        )


def test_both_send_each_over_its_own_axis(worlds: Worlds) -> None:
    for sent in worlds(4).run(counted, "ring=2,ulysses=2"):
        # Ulysses pairs hold half of the tokens, ring pairs half of the heads.
        assert sent["ulysses"][0] == STEPS * LAYERS * 4 * (TOKENS // 2) * WIDTH * ELEMENT // 4
        assert sent["ring"][0] == STEPS * LAYERS * 2 * (TOKENS // 2) * (WIDTH // 2) * ELEMENT


def test_cfg_sends_one_latent_a_step(worlds: Worlds) -> None:
    for sent in worlds(2).run(counted, "cfg=2"):
        assert sent["cfg"] == (STEPS * IMAGE * CHANNELS * ELEMENT, STEPS)


def vae_traffic() -> dict[str, tuple[int, int]]:
    family = families()["flux"]
    pipe = ditpar.parallelize(tiny.build(family), "ulysses=2")
    call = tiny.inputs(family, pipe, size=(128, 64), output_type="pt")
    image = pipe(**call).images
    assert image.shape == (1, 3, 128, 64)
    mine = torch.tensor([float(image.double().sum())], dtype=torch.float64)
    assert pipe._ditpar.mesh.world.broadcast("test", mine.clone()).equal(mine)
    return {name: (count.bytes, count.messages) for name, count in pipe._ditpar.mesh.counters.items()}


def test_the_vae_runs_on_rank_0_and_its_image_is_broadcast(worlds: Worlds) -> None:
    first, second = worlds(2).run(vae_traffic)
    assert first["components"] == (3 * 128 * 64 * ELEMENT, 1)
    assert "components" not in second


def staged(plan: str, transport: str = "shared") -> tuple[int, dict[str, tuple[int, int]]]:
    """This rank's stage, and what it sent in one request of the tiny Flux model."""
    os.environ["DITPAR_TRANSPORT"] = transport
    try:
        family = families()["flux"]
        pipe = ditpar.parallelize(tiny.build(family), plan)
        pipe(**tiny.inputs(family, pipe, size=(128, 64), steps=STAGED_STEPS, cfg=False, text_tokens=TEXT))
    finally:
        del os.environ["DITPAR_TRANSPORT"]
    mesh = pipe._ditpar.mesh
    return mesh.pipe.index, {name: (count.bytes, count.messages) for name, count in mesh.counters.items()}


STAGED_STEPS = 4


@pytest.mark.parametrize("patches", [2, 4])
@pytest.mark.parametrize("stages", [2, 3])
def test_a_stage_sends_its_rows_once_a_step(stages: int, patches: int, worlds: Worlds) -> None:
    """X a step along the chain (image and text once), one latent a step around the ring; none when all is at its end."""
    for stage, sent in worlds(stages).run(staged, f"pipe={stages},patches={patches}"):
        whole, bands = 1, STAGED_STEPS - 1
        if stage < stages - 1:
            rows = STAGED_STEPS * TOKENS * WIDTH * ELEMENT
            assert sent["pipe"] == (rows, whole * 2 + bands * (patches + 1))
            assert "pipe_back" not in sent
        else:
            assert sent["pipe_back"] == (bands * IMAGE * CHANNELS * ELEMENT, bands * patches)
            assert sent["pipe"] == ((stages - 1) * IMAGE * CHANNELS * ELEMENT, stages - 1)  # the result, to all
