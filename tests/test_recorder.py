"""Every plan's calls, as each rank issues them, are free of deadlock under NCCL's rules; and a wrong order is caught."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import recorder
import torch.distributed as dist
from recorder import Call, check
from world import Worlds

import ditpar
from ditpar.comm import Group, Work
from ditpar.conformance import tiny
from ditpar.conformance.variants import variants
from ditpar.family import families
from ditpar.plan import Plan

PLANS = ("ulysses=2", "ring=2", "ring=2,ulysses=2", "cfg=2", "cfg=2,ulysses=2", "data=2", "ulysses=3")
STAGED = (
    "pipe=2,patches=3",
    "pipe=3,patches=2",
    "pipe=2,warmup=9",
    "pipe=2,cfg=2",
    "pipe=2,ulysses=2",
    "pipe=2,ring=2",
    "pipe=4",
)
TWO = ("two", (0, 1))
ALL = ("all", (0, 1, 2))


def send(peer: int, size: int = 8, batch: int | None = 1, group: tuple[str, tuple[int, ...]] = TWO) -> Call:
    return Call(group, "send", peer, size, batch)


def recv(peer: int, size: int = 8, batch: int | None = 1, group: tuple[str, tuple[int, ...]] = TWO) -> Call:
    return Call(group, "recv", peer, size, batch)


def reduce(size: int = 8, group: tuple[str, tuple[int, ...]] = TWO) -> Call:
    return Call(group, "all_reduce", None, size)


def swap(peer: int, **options: int | None) -> list[Call]:
    """What one rank issues to swap with a peer: both in one batch."""
    return [send(peer, **options), recv(peer, **options)]  # type: ignore[arg-type]


def ring(rank: int, size: int, way: int, name: str = "all", batch: int | None = 1) -> list[Call]:
    """What one rank issues for a step of a ring, one way round or the other."""
    group = (name, tuple(range(size)))
    after, before = (rank + way) % size, (rank - way) % size
    return [send(after, batch=batch, group=group), recv(before, batch=batch, group=group)]


BOTH_WAYS = "is a ring both ways round"
GOOD: dict[str, list[list[Call]]] = {
    "nothing": [[], []],
    "batched swap": [swap(1), swap(0)],
    "unbatched in turn": [[send(1, batch=None), recv(1, batch=None)], [recv(0, batch=None), send(0, batch=None)]],
    "ring of three": [[send((r + 1) % 3, group=ALL), recv((r - 1) % 3, group=ALL)] for r in range(3)],
    "exchange of three": [[f(p, group=ALL) for p in range(3) if p != r for f in (send, recv)] for r in range(3)],
    "exchange of three, one with nothing to receive": [
        [send(1, group=ALL), recv(1, group=ALL), recv(2, group=ALL)],
        [send(0, group=ALL), recv(0, group=ALL), recv(2, group=ALL)],
        [send(0, group=ALL), send(1, group=ALL)],
    ],
    "each way round in its group": [[*ring(r, 3, 1), *ring(r, 3, -1, name="other")] for r in range(3)],
    "two groups": [[reduce(), reduce(4, ALL)], [reduce(), reduce(4, ALL)], [reduce(4, ALL)]],
}
BAD: dict[str, tuple[list[list[Call]], str]] = {
    "collectives swapped": ([[reduce(8), reduce(4)], [reduce(4), reduce(8)]], "collective 0 of two[0, 1] differs"),
    "groups swapped": (
        [[reduce(), reduce(8, ALL)], [reduce(8, ALL), reduce()], [reduce(8, ALL)]],
        "deadlock: rank 0 at step 0 (first use of 0 bytes in two[0, 1]) waits for [1], rank 1",
    ),
    "member missing": ([[reduce(8, ALL)], [reduce(8, ALL)], []], "collectives of all[0, 1, 2] lack a member"),
    "collective size": ([[reduce(8)], [reduce(16)]], "rank 1 issues all_reduce of 16 bytes"),
    "stranger": ([[reduce()], [reduce()], [reduce()]], "rank 2 calls two[0, 1], of which it is no member"),
    "message size": ([swap(1), swap(0, size=4)], "message 0 from 0 to 1 in two[0, 1]: 8 bytes sent, 4 expected"),
    "unbatched sends crossed": (
        [[send(1, batch=None), recv(1, batch=None)], [send(0, batch=None), recv(0, batch=None)]],
        "deadlock: rank 0 at step 0 (send to 1 of 8 bytes in two[0, 1]) waits for [1], rank 1 at step 0 (send to 0",
    ),
    "batched on one side": ([[send(1)], [recv(0, batch=None)]], "batched on one side only"),
    "receive without send": ([[recv(1)], [reduce()]], "1 messages from 1 to 0 in two[0, 1] are received but not sent"),
    "send without receive": ([[send(1)], []], "rank 1 has ended"),
    "first use without a member": (
        [[replace(c, group=ALL) for c in swap(1 - r)] for r in (0, 1)] + [[]],
        "2 has ended",
    ),
    "ring both ways in turn": ([[*ring(r, 3, 1), *ring(r, 3, -1, batch=2)] for r in range(3)], BOTH_WAYS),
    "ring both ways in a batch": ([[*ring(r, 4, 1), *ring(r, 4, -1)] for r in range(4)], BOTH_WAYS),
    "unbatched ring both ways": (
        [[c for way in (1, -1) for c in ring(r, 3, way, batch=None)[:: -1 if r else 1]] for r in range(3)],
        BOTH_WAYS,
    ),
    "two threads": ([[reduce(), replace(reduce(), thread=1)], [reduce(), reduce()]], "rank 0 calls two[0, 1] from 2"),
}


@pytest.mark.parametrize("name", GOOD)
def test_good_logs_pass(name: str) -> None:
    assert check(GOOD[name]) == []


@pytest.mark.parametrize("name", BAD)
def test_bad_logs_are_named(name: str) -> None:
    logs, report = BAD[name]
    found = check(logs)
    assert any(report in line for line in found), found


@cache
def _pipe(family: str):
    return variants(families()[family])[0].build(families()[family])


def record(family: str, plan: str, sabotage: bool = False) -> list[Call]:
    """One request of the family's plain variant under a plan, on every rank. Returns this rank's log."""
    log = recorder.start()
    pipe = _pipe(family)
    options = {"batch": 2} if Plan.parse(plan).data > 1 else {}
    call = variants(families()[family])[0].inputs(families()[family], pipe, **options)
    ditpar.parallelize(pipe, plan)
    try:
        mesh = pipe._ditpar.mesh
        mesh.world.pg = dist.new_group(backend=recorder.BACKEND)  # control messages are recorded too
        if sabotage and dist.get_rank() == 1:
            _swap_two(mesh.ulysses)
        pipe(**call)
    finally:
        ditpar.restore(pipe)
    return log.calls


def _swap_two(group: Group) -> None:
    """The group's next two exchanges change places."""
    start = group._start
    held: list[tuple] = []

    def hold(*args) -> list[Work]:
        if not held:
            held.append(args)
            return []
        group._start = start  # type: ignore[method-assign]
        return [*start(*args), *start(*held.pop())]

    group._start = hold  # type: ignore[method-assign]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("family", list(families()))
def test_no_plan_deadlocks(family: str, plan: str, worlds: Worlds) -> None:
    logs = worlds(Plan.parse(plan).world).run(record, family, plan)
    assert check(logs) == []
    assert all(any(call.p2p for call in log) for log in logs), "nothing was recorded"
    assert all(call.batch is not None for log in logs for call in log if call.p2p)


@pytest.mark.parametrize("plan", ["ulysses=2", "ring=2"])
def test_a_rank_is_ready_to_receive_before_it_sends(plan: str, worlds: Worlds) -> None:
    """Else gloo's word that it is ready queues behind what is sent, and the two directions take turns."""
    for log in worlds(2).run(record, "flux", plan):
        batches = [[c.kind for c in log if c.batch == n] for n in {c.batch for c in log if c.p2p}]
        assert len(batches) > 4
        assert all(kinds == ["recv", "send"] for kinds in batches), batches


def record_stages(family: str, plan: str, sabotage: str = "") -> list[Call]:
    """Five steps of a stage pipeline."""
    log = recorder.start()
    pipe = _staged(family)
    call = tiny.inputs(
        families()[family], pipe, steps=5, size=(64, 64), **({"num_frames": 17} if family == "wan" else {})
    )
    ditpar.parallelize(pipe, plan)
    try:
        engine = pipe._ditpar
        engine.mesh.world.pg = dist.new_group(backend=recorder.BACKEND)
        if sabotage == "one group":
            engine.calls.back.group = engine.mesh.pipe
        pipe(**call)
    finally:
        ditpar.restore(pipe)
    return log.calls


@cache
def _staged(family: str):
    return tiny.build(families()[family], num_layers=4)


@pytest.mark.parametrize("plan", STAGED)
@pytest.mark.parametrize("family", list(families()))
def test_no_stage_pipeline_deadlocks(family: str, plan: str, worlds: Worlds) -> None:
    logs = worlds(Plan.parse(plan).world).run(record_stages, family, plan)
    assert check(logs) == []
    waits = [sum(call.kind == "wait" for call in log) for log in logs]
    assert min(waits) >= 4, waits


def test_a_stage_awaits_its_next_unit_while_it_runs_one_also_across_steps(worlds: Worlds) -> None:
    log = worlds(2).run(record_stages, "flux", "pipe=2,patches=3")[1]
    ahead, dry = 0, 0
    for call in log:
        ahead += (call.kind == "recv") - (call.kind == "wait" and call.peer == 0)
        dry += call.kind == "wait" and call.peer == 0 and ahead == 0
    assert dry == 1, "only after the last unit of all is there nothing to wait for"


def test_both_edges_of_two_stages_need_groups_of_their_own(worlds: Worlds) -> None:
    found = check(worlds(2).run(record_stages, "flux", "pipe=2,patches=3", "one group"))
    assert any(line.startswith("deadlock") for line in found), found


@pytest.mark.parametrize("plan", ["ring=3", "ring=4"])
def test_a_ring_goes_one_way_round(plan: str, worlds: Worlds) -> None:
    logs = worlds(Plan.parse(plan).world).run(record, "flux", plan)
    assert check(logs) == []
    for log in logs:  # the same messages the other way round, in the same group
        log += [
            replace(call, kind={"send": "recv", "recv": "send"}[call.kind], batch=-call.batch)
            for call in log
            if call.batch is not None
        ]
    (found,) = check(logs)
    assert BOTH_WAYS in found


@pytest.mark.parametrize("family", ["sd3", "flux"])
def test_a_rank_that_swaps_two_exchanges_is_caught(family: str, worlds: Worlds) -> None:
    found = check(worlds(2).run(record, family, "ulysses=2", sabotage=True))
    assert any("message 0 from 0 to 1" in line and "expected" in line for line in found), found


def test_a_rank_that_swaps_a_message_and_a_collective_is_caught(worlds: Worlds) -> None:
    """The recorded calls of a plan, with one rank's last exchange before a control message put after it."""
    logs = worlds(4).run(record, "sd3", "cfg=2,ulysses=2")
    assert check(logs) == []
    log = logs[1]
    late = next(i for i in range(1, len(log)) if log[i - 1].p2p and not log[i].p2p)
    early = next(i for i in range(late) if log[i].batch == log[late - 1].batch)
    logs[1] = [*log[:early], log[late], *log[early:late], *log[late + 1 :]]
    (found,) = check(logs)
    assert found.startswith("deadlock: ") and "rank 1 at step" in found and "all_reduce" in found, found
