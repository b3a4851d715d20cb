"""PNG records: whole files, both text forms, and a round trip."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from ditpar.app.png import Record, read_png, write_png
from ditpar.errors import RequestError
from ditpar.plan import Plan
from ditpar.request import Request

RECORD = Record(
    Request("ein Apfel, größer", negative="blur", width=64, height=32, steps=4, true_cfg=3.0, seed=9, count=2),
    Plan(data=2),
    "/models/some",
    1,
    {"ditpar": "0.1.0"},
)


def test_round_trip(tmp_path: Path) -> None:
    write_png(Image.new("RGB", (8, 8), "red"), tmp_path / "new" / "a.png", RECORD)
    assert read_png(tmp_path / "new" / "a.png") == RECORD and RECORD.seed == 10
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["a.png"]


def test_the_text_form_is_what_other_tools_read(tmp_path: Path) -> None:
    write_png(Image.new("RGB", (8, 8)), tmp_path / "a.png", RECORD)
    with Image.open(tmp_path / "a.png") as image:
        lines = image.text["parameters"].splitlines()
    assert lines[:2] == ["ein Apfel, größer", "Negative prompt: blur"]
    assert lines[2] == "Steps: 4, CFG scale: 3.0, Seed: 10, Size: 64x32, Model: some, Version: ditpar 0.1.0"


def test_a_failed_write_leaves_nothing_and_keeps_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    write_png(Image.new("RGB", (8, 8), "red"), path, RECORD)
    before = path.read_bytes()

    class Fails(Image.Image):
        def save(self, fp, *args, **kwargs):
            fp.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_png(Fails(), path, RECORD)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["a.png"]


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="cannot be written"):
        write_png(Image.new("RGB", (8, 8)), tmp_path / "file" / "a.png", RECORD)


def test_records_of_another_format_or_broken_ones(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="format 99"):
        Record.from_json({**RECORD.to_json(), "format": 99})
    data = RECORD.to_json()
    assert Record.from_json(data) == RECORD
