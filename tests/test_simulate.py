"""The simulated stage pipeline: timelines computed by hand, no bubbles where there need be none, deadlocks named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ditpar.planner.simulate import Costs, ScheduleError, Timeline, Wire, by_queries, rounds, simulate
from ditpar.stage import program
from ditpar.stage.cut import bands
from ditpar.stage.program import Act, Edge, Kind, Op, Round, Span
from ditpar.trace import read

MS = 1_000_000
EQUAL = Costs(by_queries(1e-3))
"""A millisecond a row."""
IMAGE, TEXT = 4096, 512
"""Tokens of a Flux picture of 1024 x 1024 pixels with a long prompt."""


def run(stages: int, patches: int, costs: Costs = EQUAL, steps: int = 4, **options: int) -> Timeline:
    """A request whose patches have one row each."""
    return simulate(rounds(steps, bands(patches, patches), **options)[0], stages, costs)


def spans(timeline: Timeline, stage: int, what: str = "compute") -> list[tuple[float, float]]:
    """Begin and end of a stage's events, in milliseconds."""
    return [(e.begin / MS, e.end / MS) for e in timeline.by_stage[stage] if e.what == what]


def bubbles(timeline: Timeline) -> float:
    return 1 - timeline.mean(steady=True).busy


@pytest.mark.parametrize("stages", range(2, 33))
@pytest.mark.parametrize("patches", [lambda n: n, lambda n: n + 1, lambda n: 2 * n], ids=["N", "N+1", "2N"])
def test_equal_patches_leave_no_bubbles(stages: int, patches: Callable[[int], int]) -> None:
    assert bubbles(run(stages, patches(stages), steps=3)) < 0.02


def test_too_few_patches_leave_bubbles() -> None:
    assert bubbles(run(4, 2, steps=12)) == pytest.approx(0.5, abs=0.05)


def test_one_stage_takes_the_sum() -> None:
    timeline = run(1, 5, Costs(by_queries(1e-3, text=2), overhead=0.25e-3), steps=4, warmup=2, calls=2)
    assert timeline.seconds == pytest.approx(4 * (2 * 7 + 0.25) * 1e-3)
    assert timeline.mean().busy == 1
    assert {e.what for e in timeline.by_stage[0]} == {"compute"}


def test_two_stages_two_patches_by_hand() -> None:
    timeline = run(2, 2, steps=3)
    assert spans(timeline, 0) == [(0, 2), (4, 5), (5, 6), (6, 7), (7, 8)]
    assert spans(timeline, 1) == [(2, 4), (5, 6), (6, 7), (7, 8), (8, 9)]
    assert spans(timeline, 0, "wait") == [(2, 4)]
    assert spans(timeline, 1, "wait") == [(0, 2), (4, 5)]
    assert timeline.end == 9 * MS and timeline.steady == (5 * MS, 8 * MS)
    first, last = timeline.shares()
    assert (first.busy, first.waiting, first.idle) == pytest.approx((6 / 9, 2 / 9, 1 / 9))
    assert (last.busy, last.waiting, last.idle) == pytest.approx((6 / 9, 3 / 9, 0))


def test_latency_and_bandwidth_by_hand() -> None:
    wire = Wire(latency=0.5e-3, bandwidth=1000)
    costs = Costs(by_queries(1e-3), wires=wire, chain_bytes=lambda unit: unit.rows.size, ring_bytes=lambda rows: 2)
    timeline = run(2, 2, costs, steps=2)
    # The sync unit: 2 ms, 2 bytes at 1 ms each, 0.5 ms; then both rows go around, 2 ms each, one after the other.
    assert spans(timeline, 1)[0] == (4.5, 6.5)
    assert spans(timeline, 0) == [(0, 2), (9, 10), (11, 12)]
    assert spans(timeline, 1)[1:] == [(11.5, 12.5), (13.5, 14.5)]
    assert timeline.end == 14.5 * MS


def test_a_link_carries_its_messages_one_after_another() -> None:
    costs = Costs(by_queries(1e-3), wires=[Wire(bandwidth=0.5e3), Wire()], chain_bytes=lambda unit: unit.rows.size)
    timeline = run(2, 3, costs, steps=2)
    # Units of 1 ms leave at 10, 11 and 12 ms, but each needs 2 ms of the link.
    assert spans(timeline, 0) == [(0, 3), (12, 13), (13, 14), (14, 15)]
    assert spans(timeline, 1) == [(9, 12), (15, 16), (17, 18), (19, 20)]


def test_a_send_holds_up_its_stage_for_the_handover_only() -> None:
    timeline = run(2, 2, Costs(by_queries(1e-3), wires=Wire(latency=1e-3, handover=0.25e-3)), steps=2)
    assert spans(timeline, 0, "send") == [(2, 2.25), (7.5, 7.75), (8.75, 9)]
    assert spans(timeline, 0) == [(0, 2), (6.5, 7.5), (7.75, 8.75)]
    assert spans(timeline, 1)[0] == (3.25, 5.25) and spans(timeline, 1, "send") == [(5.25, 5.5), (5.5, 5.75)]


def test_synchronous_rounds_take_the_sum_of_the_stages() -> None:
    wires = [Wire(latency=ms * 1e-3) for ms in (1, 2, 4)]
    costs = Costs(lambda unit, stage: (stage + 1) * 1e-3, overhead=0.5e-3, wires=wires)
    timeline = run(3, 3, costs, steps=4, warmup=4)
    # Of the overhead only the first stage's first shows: what follows happens while they wait.
    assert timeline.seconds == pytest.approx((0.5 + 4 * (1 + 2 + 3) + 4 * (1 + 2) + 3 * 4) * 1e-3)
    assert timeline.steady is None
    with pytest.raises(ValueError, match="no steady state"):
        timeline.shares(steady=True)


@pytest.mark.parametrize(("stages", "patches"), [(2, 2), (4, 4), (4, 5), (8, 8)])
def test_two_calls_a_step_in_call_major_order_leave_no_bubbles(stages: int, patches: int) -> None:
    timeline = run(stages, patches, calls=2)
    assert bubbles(timeline) == 0
    steady = [e.facts for e in timeline.by_stage[0] if e.facts.get("step") == 2]
    assert [(f["run"], f["part"]) for f in steady] == [(r, p) for r in (4, 5) for p in range(patches)]


def test_cfg_ranks_share_out_the_calls_in_pairs() -> None:
    cut = bands(4, 2)
    alone, (first, second) = rounds(3, cut, calls=2), rounds(3, cut, calls=2, cfg=2)
    assert [[units[0].run for units in r.runs] for r in alone[0]] == [[0, 1], [2, 3], [4, 5]]
    assert [[units[0].run for units in r.runs] for r in first] == [[0], [2], [4]]
    assert [[units[0].run for units in r.runs] for r in second] == [[1], [3], [5]]
    assert [r.inflow for r in first] == [r.inflow for r in second] == [(), tuple(cut), tuple(cut)]
    assert simulate(first, 2, EQUAL).end == simulate(second, 2, EQUAL).end < simulate(alone[0], 2, EQUAL).end
    one = rounds(3, cut, cfg=2)
    assert one[0] == one[1] == rounds(3, cut)[0]
    with pytest.raises(ValueError, match="cfg=3"):
        rounds(3, cut, cfg=3)


def test_the_rounds_of_a_request() -> None:
    made = rounds(4, bands(6, 3), warmup=2)[0]
    assert [r.runs[0][0].kind for r in made] == [Kind.SYNC, Kind.SYNC, Kind.PATCH, Kind.PATCH]
    whole, cut = (Span(0, 6),), (Span(0, 2), Span(2, 4), Span(4, 6))
    assert [r.inflow for r in made] == [(), whole, cut, cut]
    assert [r.outflow for r in made] == [whole, cut, cut, ()]
    assert rounds(2, bands(6, 3), warmup=0) == rounds(2, bands(6, 3), warmup=1)


@pytest.mark.parametrize(("stages", "patches", "ignored"), [(4, 5, 0.13), (8, 9, 0.40), (8, 16, 0.25)])
def test_bands_that_count_the_text_keep_the_stages_busy(stages: int, patches: int, ignored: float) -> None:
    costs = Costs(by_queries(1e-6, text=TEXT))
    balanced, equal = (simulate(rounds(12, bands(IMAGE, patches, 1, lead))[0], stages, costs) for lead in (TEXT, 0.0))
    assert bubbles(balanced) < 0.1
    assert bubbles(equal) == pytest.approx(ignored, abs=0.01)


def test_a_text_that_outweighs_a_share_cannot_be_hidden() -> None:
    patches = stages = 16
    costs = Costs(by_queries(1e-6, text=TEXT))
    timeline = simulate(rounds(12, bands(IMAGE, patches, 1, TEXT))[0], stages, costs)
    # A step lasts until the first unit (the text and one row) has been through all stages.
    assert bubbles(timeline) == pytest.approx(1 - (IMAGE + TEXT) / (stages * (TEXT + 1)), abs=0.01)


@settings(max_examples=60, deadline=None)
@given(
    stages=st.integers(1, 6),
    patches=st.integers(1, 8),
    steps=st.integers(1, 5),
    calls=st.integers(1, 2),
    text=st.integers(0, 9),
    latency=st.integers(0, 3),
)
def test_a_timeline_is_possible(stages: int, patches: int, steps: int, calls: int, text: int, latency: int) -> None:
    costs = Costs(by_queries(1e-3, text=text), wires=Wire(latency=latency * 1e-3))
    timeline = run(stages, patches, costs, steps, calls=calls)
    ends: dict[tuple[int, int], int] = {}
    for events in timeline.by_stage:
        assert all(a.end <= b.begin for a, b in pairwise(events))
        units = [e for e in events if e.what == "compute"]
        for e in units:
            key = (e.facts["run"], e.facts["part"])
            assert e.begin >= ends.get(key, -latency * MS) + latency * MS
            ends[key] = e.end
        assert sum(e.end - e.begin for e in units) == steps * calls * (patches + text) * MS
    for share in timeline.shares():
        assert share.busy + share.waiting + share.idle == pytest.approx(1) and min(share.busy, share.idle) >= 0
    assert timeline.end == max(events[-1].end for events in timeline.by_stage)


def test_the_example_in_the_docs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parent.parent / "docs" / "simulator.md").read_text()
    code, output = page.split("```python\n")[1].split("```\n")[:3:2]
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    assert capsys.readouterr().out == output
    assert len(read(tmp_path / "pipeline.json")) == 4


# -- schedules that cannot be run --------------------------------------------------------------------------------------

Change = Callable[[list[Op]], list[Op]]


def broken(monkeypatch: pytest.MonkeyPatch, stage: int, change: Change) -> Callable[..., Timeline]:
    """A request on three stages, on one of which the operations of a patched round are changed."""
    real = program.ops

    def ops(index: int, stages: int, this: Round) -> Iterator[Op]:
        made = list(real(index, stages, this))
        patched = this.runs[0][0].kind is Kind.PATCH
        return iter(change(made) if patched and index == stage else made)

    monkeypatch.setattr(program, "ops", ops)
    return lambda steps=3: run(3, 3, steps=steps)


def test_a_deadlock_names_what_each_stage_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def never_sends(made: list[Op]) -> list[Op]:
        return [op for op in made if op.act is not Act.SEND]

    with pytest.raises(ScheduleError) as caught:
        broken(monkeypatch, 1, never_sends)()
    assert str(caught.value) == (
        "no stage can go on: "
        "stage 0 waits for rows 0 to 1 around the ring in round 2; "
        "stage 1 waits for unit 0 of call 2 (rows 0 to 1) in round 2; "
        "stage 2 waits for unit 0 of call 1 (rows 0 to 1) in round 1"
    )


def test_receiving_before_sending_around_the_ring_is_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    real = program.ops

    def ops(index: int, stages: int, this: Round) -> Iterator[Op]:
        """All stages wait for the rows of the whole round first, as if the ring edge came before any work."""
        ring = [Op(Act.RECV, edge=Edge.RING, rows=rows) for rows in this.outflow if index == 0]
        return iter([*ring, *real(index, stages, this)])

    monkeypatch.setattr(program, "ops", ops)
    with pytest.raises(ScheduleError, match="stage 0 waits for rows 0 to 2 around the ring in round 0; stage 1 waits"):
        run(2, 2, steps=3, warmup=3)


def test_an_order_swapped_on_one_stage_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def swapped(made: list[Op]) -> list[Op]:
        return [*made[3:6], *made[:3], *made[6:]]

    expected = (
        r"stage 1 in round 1 waits for unit 1 of call 1 \(rows 1 to 2\), but unit 0 of call 1 \(rows 0 to 1\) comes"
    )
    with pytest.raises(ScheduleError, match=expected):
        broken(monkeypatch, 1, swapped)()


def test_a_message_that_nobody_takes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def sends_once_more(made: list[Op]) -> list[Op]:
        return [*made, *[op for op in made if op.act is Act.SEND][-1:]]

    with pytest.raises(
        ScheduleError, match=r"stage 0 sent unit 2 of call 1 \(rows 2 to 3\), which stage 1 never takes"
    ):
        broken(monkeypatch, 0, sends_once_more)(steps=2)


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        (Costs(by_queries(-1.0)), "not negative"),
        (Costs(by_queries(float("nan"))), "finite"),
        (Costs(by_queries(1.0), wires=[Wire()]), "1 links for 2 stages"),
    ],
)
def test_costs_that_make_no_sense_are_refused(costs: Costs, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        run(2, 2, costs)
