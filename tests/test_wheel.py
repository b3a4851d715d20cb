"""A built wheel holds everything and works from any folder; the folder kernels/ shadows no library."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

CHECK = """
import importlib.util, sys
sys.path = [p for p in sys.path if p not in ("", {root!r})]
import ditpar, ditpar.app.cli, ditpar.kernels.merge, ditpar.pipelines.flux, ditpar.gang.modelfolder as m
assert ditpar.__file__.startswith({target!r}), ditpar.__file__
assert m.check_model_folder(m.DEFAULT_MODEL) is None and str(m.DEFAULT_MODEL).startswith({target!r})
assert m.read_model("emoji").defaults["true_cfg_scale"] == 3.0
assert (m.DEFAULT_MODEL / "CARD.md").is_file() and (m.DEFAULT_MODEL / "LICENSE").is_file()
from ditpar.family import families
assert len(families()) == 5
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--disable-pip-version-check",
    ]
    subprocess.run([*pip, "--target", str(folder), str(ROOT)], check=True, timeout=200)
    return folder


def python(folder: Path, cwd: Path, *args: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run([sys.executable, *args], env=env, cwd=cwd, capture_output=True, text=True, timeout=100)


def test_the_wheel_has_everything(target: Path, tmp_path: Path) -> None:
    done = python(target, tmp_path, "-c", CHECK.format(root=str(ROOT), target=str(target)))
    assert done.returncode == 0, done.stderr
    names = {path.name for path in target.iterdir()}
    assert not names & {"kernels", "app", "pipelines", "tests"}


def test_the_wheels_command_generates(target: Path, tmp_path: Path) -> None:
    args = ("-m", "ditpar.app.cli", "generate", "pizza", "--ranks", "2", "--steps", "1", "--out", "pizza.png")
    done = python(target, tmp_path, *args)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "pizza.png").stat().st_size > 1000


def test_the_repository_root_does_not_shadow_the_kernels_library(tmp_path: Path) -> None:
    find = "from importlib.util import find_spec as find; print(getattr(find('kernels'), 'origin', None))"
    code = f"import sys; sys.path.insert(0, ''); {find}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "None", done.stdout + done.stderr  # a namespace portion at most: a real library wins
    library = tmp_path / "kernels"
    library.mkdir()
    (library / "__init__.py").write_text("")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == str(library / "__init__.py")
