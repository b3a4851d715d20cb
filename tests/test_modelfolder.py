"""Model folders: what is checked before anything starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import ditpar
from ditpar.errors import ModelError
from ditpar.gang.modelfolder import DEFAULT_MODEL, read_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the bundled model that a test may break."""
    return Path(shutil.copytree(DEFAULT_MODEL, tmp_path / "model"))


def cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / "model_index.json").unlink(), "model_index.json is missing"),
        (lambda f: (f / "model_index.json").write_text("{"), "model_index.json cannot be read as JSON"),
        (lambda f: (f / "model_index.json").write_text("[]"), "must hold a JSON object"),
        (lambda f: (f / "model_index.json").write_text("{}"), "names no pipeline class"),
        (lambda f: shutil.rmtree(f / "vae"), "component folder .*vae is missing"),
        (lambda f: (f / WEIGHTS).unlink(), "no .*safetensors weights"),
        (lambda f: cut(f / WEIGHTS, 100_000), "truncated"),
        (lambda f: cut(f / WEIGHTS, 20), "truncated"),
        (lambda f: cut(f / WEIGHTS, 0), "truncated"),
        (lambda f: (f / WEIGHTS).rename(f / "transformer/diffusion_pytorch_model.bin"), "is a pickle"),
        (lambda f: (f / "transformer/config.json").write_text("no"), "config.json cannot be read"),
        (lambda f: (f / "ditpar.json").write_text('{"defaults": 3}'), "defaults must be an object"),
    ],
)
def test_damaged_models_are_refused_by_the_name_of_the_file(folder: Path, damage: Any, words: str) -> None:
    damage(folder)
    with pytest.raises(ModelError, match=words):
        read_model(folder)


def test_a_model_that_only_fails_to_load_says_why(folder: Path) -> None:
    config = json.loads((folder / "vae/config.json").read_text())
    (folder / "vae/config.json").write_text(json.dumps({**config, "latent_channels": 5}))
    with pytest.raises(ModelError, match="could not be loaded"):
        ditpar.load(folder)
