"""Traces of ranks: shares of time, files that viewers read, and the command that sums them up."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ditpar.app import cli
from ditpar.errors import RequestError
from ditpar.planner.simulate import Costs, by_queries, rounds, simulate
from ditpar.stage.cut import bands
from ditpar.trace import Event, Shares, Trace, chrome, mean, read, shares

START = 5_000_000_000_000_123
"""A monotonic clock after two months: microseconds as floats would lose nanoseconds."""

TWO = [
    [
        Event("compute", "unit 0", START, START + 100, {"step": 1, "rows": [0, 4]}),
        Event("wait", "chain", START + 10, START + 30),  # inside the unit
        Event("send", "chain", START + 90, START + 120, {"bytes": 64.0}),  # begins inside it
        Event("wait", "ring", START + 150, START + 200),
    ],
    [Event("compute", "unit 0", START + 101, START + 151)],
]


def test_waits_and_sends_within_units_count_once() -> None:
    first, second = shares(TWO)
    assert (first.busy, first.waiting, first.idle) == pytest.approx((100 / 200, 70 / 200, 30 / 200))
    assert (second.busy, second.waiting, second.idle) == pytest.approx((0.25, 0, 0.75))
    total = mean([first, second])
    assert (total.busy, total.waiting, total.idle) == pytest.approx((0.375, 0.175, 0.45))


def test_shares_of_a_window() -> None:
    first, second = shares(TWO, (START + 20, START + 60))
    assert (first.busy, first.waiting, first.idle) == pytest.approx((0.75, 0.25, 0))
    assert second == Shares(0, 0, 1)
    with pytest.raises(ValueError, match="nothing happens"):
        shares(TWO, (5, 5))
    with pytest.raises(ValueError, match="nothing happens"):
        shares([[], []])


SPAN = st.tuples(st.sampled_from(["compute", "send", "wait"]), st.integers(0, 30), st.integers(0, 30))


@settings(deadline=None)
@given(st.lists(SPAN, min_size=1, max_size=8))
def test_shares_against_counting_each_nanosecond(spans: list[tuple[Any, int, int]]) -> None:
    events = [Event(what, "", begin, begin + length) for what, begin, length in spans]
    kinds = [{e.what for e in events if e.begin <= t < e.end} for t in range(60)]
    waiting = sum("wait" in kind for kind in kinds)
    idle = sum(not kind for kind in kinds)
    (found,) = shares([events], (0, 60))
    assert (found.busy, found.waiting, found.idle) == pytest.approx(
        ((60 - waiting - idle) / 60, waiting / 60, idle / 60)
    )


def test_spans_of_a_trace_nest() -> None:
    trace = Trace()
    with trace.span("compute", "unit"), trace.span("wait", "chain", bytes=8):
        pass
    wait, unit = trace.events
    assert unit.begin <= wait.begin <= wait.end <= unit.end and wait.facts == {"bytes": 8}


def test_a_file_gives_back_the_events(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    for by_rank in (TWO, [*TWO, []]):
        file.write_text(json.dumps(chrome(by_rank)))
        assert read(file) == by_rank


def test_chromes_format() -> None:
    made = chrome(TWO)
    names = {e["pid"]: e["args"]["name"] for e in made["traceEvents"] if e["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1"}
    spans = [e for e in made["traceEvents"] if e["ph"] == "X"]
    assert spans[0] == {
        "ph": "X",
        "cat": "compute",
        "name": "unit 0",
        "pid": 0,
        "tid": 0,
        "ts": 0.0,
        "dur": 0.1,
        "args": {"step": 1, "rows": [0, 4]},
    }
    assert [e["pid"] for e in spans] == [0, 0, 0, 0, 1] and spans[-1]["ts"] == 0.101


def entry(**changes: Any) -> str:
    """A trace of one event, some fields of which are others."""
    made = chrome([TWO[1]])
    made["traceEvents"][-1].update(changes)
    return json.dumps(made)


BAD = {
    "no JSON": "GIF89a",
    "no text": b"\xff\xfe\x00",
    "another JSON": "[1, 2]",
    "events of something else": '{"otherData": {"origin_ns": 0}, "traceEvents": [3]}',
    "no events": json.dumps(chrome([[], []])),
    "a foreign kind": entry(cat="kernel"),
    "facts that are none": entry(args=3),
    "a rank left out": entry(pid=7),
    "a rank with a name": entry(pid="main"),
    "a list for a rank": entry(pid=[]),
    "a time that is none": entry(ts=float("nan")),
    "a time without end": entry(dur=float("inf")),
    "an end before the begin": entry(dur=-1),
    "too deep": "[" * 100_000,
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD.keys())
def test_files_that_are_no_traces(content: str | bytes, tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(RequestError, match=r"bad\.json: (not a trace of ditpar|a trace without|an event ends)"):
        read(file)


# -- the command -------------------------------------------------------------------------------------------------------

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`ditpar trace` in this process: (exit code, stdout, stderr)."""
    handler = signal.getsignal(signal.SIGTERM)

    def command(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ditpar", "trace", *map(str, args)])
        try:
            with pytest.raises(SystemExit) as caught:
                cli.main()
        finally:
            signal.signal(signal.SIGTERM, handler)
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return command


def test_the_command_shows_shares_of_a_simulated_pipeline(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    timeline = simulate(rounds(3, bands(2, 2))[0], 2, Costs(by_queries(1e-3)))
    file.write_text(json.dumps(chrome(timeline.by_stage)))
    code, out, err = run(file)
    rows = [line.replace("│", " ").split() for line in out.splitlines()]
    assert code == 0 and not err and "0.009 s" in out
    assert ["0", "66.7%", "22.2%", "11.1%"] in rows
    assert ["1", "66.7%", "33.3%", "0.0%"] in rows
    assert ["total", "66.7%", "27.8%", "5.6%"] in rows
    code, out, _ = run(file, "--json")
    found = json.loads(out)
    assert code == 0 and found["seconds"] == 0.009
    assert found["ranks"][1] == pytest.approx({"busy": 6 / 9, "waiting": 3 / 9, "idle": 0})
    assert found["total"]["idle"] == pytest.approx(1 / 18)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        ("{}", "not a trace of ditpar"),
        (entry(dur=0), "all events take no time"),
    ],
)
def test_the_command_refuses_a_bad_file(content: str | None, words: str, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    if content is not None:
        file.write_text(content)
    code, out, err = run(file)
    assert code == 3 and not out and err.count("\n") == 1 and f"{file}: {words}" in err
    code, out, _ = run(file, "--json")
    error = json.loads(out)["error"]
    assert code == 3 and error["type"] == "RequestError" and words in error["message"]


def test_the_command_without_a_file_is_a_usage_error(run: Run) -> None:
    code, _, err = run()
    assert code == 2 and "Missing argument" in err
