"""The command line: pictures with their record, repeats, exit codes, and bad input of every kind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image

from ditpar.app import cli
from ditpar.app.png import read_png
from ditpar.gang.modelfolder import DEFAULT_MODEL

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """The command in this process, in an empty folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    handler = signal.getsignal(signal.SIGTERM)

    def command(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ditpar", *args])
        try:
            with pytest.raises(SystemExit) as caught:
                cli.main()
        finally:
            signal.signal(signal.SIGTERM, handler)
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return command


def test_generate_four_and_each_again_alone(run: Run, tmp_path: Path) -> None:
    code, out, err = run("generate", "red apple", "--ranks", "2", "--steps", "2", "--seed", "42", "--count", "4")
    paths = [Path(line) for line in out.splitlines()]
    assert code == 0 and [p.name for p in paths] == [f"red-apple-{s}.png" for s in (42, 43, 44, 45)]
    assert "s/step" in err
    pictures = [Image.open(p).tobytes() for p in paths]
    assert len(set(pictures)) == 4
    record = read_png(paths[2])
    assert record.seed == 44 and str(record.plan) == "cfg=2" and record.model == "emoji"
    assert record.request.true_cfg == 3.0 and record.request.extra == {"max_sequence_length": 16}
    code, out, _ = run("generate", "--from", str(paths[2]), "--out", "again.png", "--json")
    summary = json.loads(out)
    assert code == 0 and summary["images"][0]["seed"] == 44 and len(summary["ranks"]) == 2
    assert Image.open("again.png").tobytes() == pictures[2]
    code, out, _ = run("generate", "--from", str(paths[2]), "--seed", "43", "--out", "other.png")
    assert Image.open("other.png").tobytes() == pictures[1]
    code, out, _ = run("show", str(paths[0]))
    assert code == 0 and "red apple" in out and "cfg=2" in out
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*(p.name for p in paths), "again.png", "other.png"])


def test_a_data_plan_makes_its_images_in_one_call_and_repeats_them(run: Run) -> None:
    code, out, _ = run(
        "generate", "castle", "--plan", "data=2", "--steps", "2", "--seed", "7", "--count", "2", "--out", "d"
    )
    paths = out.split()
    assert code == 0 and [read_png(Path(p)).index for p in paths] == [0, 1]
    assert Image.open(paths[0]).tobytes() != Image.open(paths[1]).tobytes()
    code, _, _ = run("generate", "--from", paths[1], "--out", "again.png")
    assert Image.open("again.png").tobytes() == Image.open(paths[1]).tobytes()
    code, out, _ = run("generate", "--from", paths[1], "--count", "2", "--out", "more")
    assert code == 0 and [read_png(Path(p)).seed for p in out.split()] == [8, 9]


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        ((), 2, "prompt is needed"),
        (("x", "--size", "256"), 2, "WxH"),
        (("x", "--steps", "many"), 2, "valid integer"),
        (("x", "--nonsense"), 2, "No such option"),
        (("x", "--set", "novalue"), 2, "KEY=VALUE"),
        (("  ",), 3, "prompt must not be empty"),
        (("x" * 20001,), 3, "20000 characters"),
        (("x", "--size", "100x256"), 3, "width=100 must be a multiple of 8"),
        (("x", "--size", "256x99999"), 3, "16384"),
        (("x", "--size", "264x256"), 3, "width=264 must be a multiple of 16"),
        (("x", "--steps", "0"), 3, "steps=0"),
        (("x", "--count", "0"), 3, "count=0"),
        (("x", "--seed", "-1"), 3, "seed=-1"),
        (("x", "--true-cfg", "-2"), 3, "true_cfg=-2"),
        (("x", "--set", "made_up=1"), 3, "made_up"),
        (("x", "--set", "height=64"), 3, "height has a field of its own"),
        (("x", "--plan", "tensor=2"), 3, "not built yet"),
        (("x", "--trace", "no/such/folder/t.json"), 3, "must be a file in a folder that exists"),
        (("x", "--plan", "pipe=2,warmup=0"), 3, "warmup=0 must be a whole number of at least 1"),
        (("x", "--plan", "cfg"), 3, "cfg"),
        (("x", "--plan", "ulysses=8"), 3, "4 attention heads"),
        (("x", "--plan", "cfg=2", "--ranks", "3"), 3, "needs 2 ranks but there are 3"),
        (("x", "--ranks", "0"), 3, "--ranks 0"),
        (("x", "--plan", "cfg=2", "--true-cfg", "1"), 3, "true_cfg_scale above 1"),
        (("x", "--plan", "data=2"), 3, "data=2 needs at least 2 images"),
        (("x", "--plan", "data=2", "--count", "3"), 3, "multiple"),
        (("x", "--model", "/no/such/folder"), 3, "no folder"),
        (("x", "--model", "nobody/nothing"), 3, "neither a folder nor a model"),
        (("x", "--from", "/no/such.png"), 3, "does not exist"),
        (("x", "--out", "picture.jpg"), 3, "written as .png"),
    ],
)
def test_bad_input_is_named_and_makes_nothing(
    run: Run, tmp_path: Path, args: tuple[str, ...], code: int, words: str
) -> None:
    got, out, err = run("generate", *args)
    assert got == code and words in " ".join(err.replace("│", " ").split()), err
    assert out == "" and list(tmp_path.iterdir()) == []
    if code == 3:
        assert err.count("\n") == 1
        got, out, _ = run("generate", *args, "--json")
        assert got == 3 and words in json.loads(out)["error"]["message"]


def broken(kind: str, folder: Path) -> Path:
    """A copy of the bundled model with one thing wrong."""
    model = folder / "model"
    shutil.copytree(DEFAULT_MODEL, model)
    weights = model / "transformer" / "diffusion_pytorch_model.safetensors"
    if kind == "no index":
        (model / "model_index.json").unlink()
    elif kind == "broken index":
        (model / "model_index.json").write_text("{")
    elif kind == "truncated":
        os.truncate(weights, weights.stat().st_size // 2)
    elif kind == "truncated header":
        os.truncate(weights, 100)
    elif kind == "pickled":
        weights.rename(weights.with_name("diffusion_pytorch_model.bin"))
    elif kind == "no weights":
        weights.unlink()
    elif kind == "no component":
        shutil.rmtree(model / "vae")
    elif kind == "other transformer":
        text = (model / "model_index.json").read_text()
        (model / "model_index.json").write_text(text.replace("FluxTransformer2DModel", "MadeUpModel"))
    return model


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("no index", "model_index.json is missing"),
        ("broken index", "cannot be read as JSON"),
        ("truncated", "is truncated"),
        ("truncated header", "header is truncated"),
        ("pickled", "is a pickle"),
        ("no weights", "no *.safetensors weights"),
        ("no component", "vae is missing"),
        ("other transformer", "adding-a-family"),
    ],
)
def test_broken_model_folders(run: Run, tmp_path_factory: pytest.TempPathFactory, kind: str, words: str) -> None:
    model = broken(kind, tmp_path_factory.mktemp("broken"))
    code, _, err = run("generate", "x", "--model", str(model))
    assert code == 3 and words in err


@pytest.mark.parametrize(
    ("pipeline", "args", "words"),
    [
        ("PixArtAlphaPipeline", ("--true-cfg", "3"), "--true-cfg: PixArtAlphaPipeline takes no true_cfg_scale"),
        ("StableDiffusion3Pipeline", ("--set", "made_up=1"), "made_up: StableDiffusion3Pipeline takes callback"),
        ("WanPipeline", (), "makes videos"),
    ],
)
def test_arguments_are_those_of_the_models_pipeline(
    run: Run, tmp_path_factory: pytest.TempPathFactory, pipeline: str, args: tuple[str, ...], words: str
) -> None:
    model = broken("nothing", tmp_path_factory.mktemp("model"))
    index = model / "model_index.json"
    index.write_text(index.read_text().replace("FluxPipeline", pipeline))
    code, _, err = run("generate", "x", "--model", str(model), *args)
    assert code == 3 and words in err


def test_show_refuses_files_without_a_record(run: Run, tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save("plain.png")
    Path("text.png").write_text("no image")
    for name, words in (
        ("plain.png", "no ditpar metadata"),
        ("text.png", "no readable image"),
        ("none.png", "not exist"),
    ):
        code, _, err = run("show", name)
        assert code == 3 and words in err


def started(tmp_path: Path, *args: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ditpar.app.cli", "generate", "castle", "--seed", "1", *args]
    return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_stops_all_ranks_and_leaves_no_half_file(tmp_path: Path, how: int) -> None:
    process = started(tmp_path, "--ranks", "2", "--steps", "400", "--count", "2")
    ranks: list[psutil.Process] = []
    end = time.monotonic() + 60
    while time.monotonic() < end and len(ranks) < 3:
        ranks = psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.1)
    time.sleep(2)
    process.send_signal(how)
    begun = time.monotonic()
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130 and "interrupted" in err and "Traceback" not in err
    assert time.monotonic() - begun < 5
    assert psutil.wait_procs(ranks, timeout=5)[1] == []
    assert list(tmp_path.iterdir()) == []


def test_an_engine_fault_is_exit_code_5(tmp_path: Path) -> None:
    process = started(tmp_path, "--ranks", "2", "--steps", "400")
    ranks: list[psutil.Process] = []
    end = time.monotonic() + 60
    while time.monotonic() < end and len(ranks) < 3:
        ranks = psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.1)
    ranks[-1].send_signal(signal.SIGKILL)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 5 and "died: killed by SIGKILL" in err
    assert psutil.wait_procs(ranks, timeout=5)[1] == []


def test_doctor_finds_this_machine_usable(run: Run) -> None:
    code, out, _ = run("doctor", "--json")
    found: dict[str, Any] = json.loads(out)
    assert code == 0 and found["usable"] and found["two ranks"]["exchange of 1 KiB, us"] > 0
    assert found["versions"]["torch"]


def test_selftest_of_one_family(run: Run) -> None:
    code, out, _ = run("selftest", "--family", "pixart", "--json")
    rows = json.loads(out)["rows"]
    assert code == 0 and len(rows) >= 4 and all(row["error"] <= 1e-5 for row in rows)
    assert run("selftest", "--family", "made-up")[0] == 3


def test_conform_and_help(run: Run) -> None:
    code, out, _ = run("conform", "PixArtTransformer2DModel", "--variant", "plain")
    assert code == 0 and "every claim is proved" in out
    code, _, err = run("conform", "MadeUpModel")
    assert code == 3 and "adding-a-family" in err
    code, out, _ = run("--help")
    assert code == 0 and all(name in out for name in ("generate", "show", "doctor", "selftest", "conform"))
    assert run("--version")[1].strip() == "0.1.0"
    assert run("--show-completion")[0] in (0, 1)  # it asks for the shell, which a test has none of


def test_a_trace_of_two_stages(run: Run) -> None:
    options = ("--plan", "pipe=2", "--steps", "4", "--size", "64x64", "--seed", "3", "--trace", "t.json")
    code, out, err = run("generate", "red apple", *options)
    assert code == 0 and Path(out.strip()).exists(), err
    code, out, _ = run("trace", "t.json", "--json")
    ranks = json.loads(out)["ranks"]
    assert code == 0 and len(ranks) == 2 and all(0 < rank["busy"] <= 1 for rank in ranks)


@pytest.mark.parametrize(("plan", "ranks"), [("single", 1), ("cfg=2", 2), ("ulysses=2", 2)])
def test_a_trace_of_any_plan(plan: str, ranks: int, run: Run) -> None:
    options = ("--plan", plan, "--steps", "2", "--size", "64x64", "--trace", "t.json")
    assert run("generate", "red apple", *options)[0] == 0
    code, out, _ = run("trace", "t.json", "--json")
    assert code == 0 and [0.1 < rank["busy"] <= 1 for rank in json.loads(out)["ranks"]] == [True] * ranks
