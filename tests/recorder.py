"""Issue-order recorder: what every rank hands to its communicators, in order, and whether NCCL could deadlock on it.

A process group of the backend `recorder` notes each call. Point-to-point calls then complete at once with zeros, so
that ranks in a wrong order run to the end and can be told about; collectives, which carry the objects that ranks agree
on, go on to a real gloo group. As the backend is not gloo, ditpar takes the same path as with NCCL.

`check` plays all ranks' calls against each other, with every call waiting for its counterparts. That is stricter than
NCCL with its streams, where order can still matter between communicators that share a device.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

BACKEND = "recorder"


@dataclass(frozen=True)
class Call:
    """One call of one rank.

    Attributes:
        group: name and global ranks of the process group.
        kind: `send`, `recv` or the collective.
        peer: the other global rank of a point-to-point call, the source of a broadcast, None for others.
        bytes: size of this rank's tensor.
        batch: number of the batch that it is part of; None outside batches.
        thread: who called.
        number: of a point-to-point call outside batches that was not waited for at once, and of the `wait` for it.
    """

    group: tuple[str, tuple[int, ...]]
    kind: str
    peer: int | None
    bytes: int
    batch: int | None = None
    thread: int = 0
    number: int | None = None

    @property
    def p2p(self) -> bool:
        return self.kind in ("send", "recv")

    def __str__(self) -> str:
        peer = "" if self.peer is None else f" {'to' if self.kind == 'send' else 'from'} {self.peer}"
        return f"{self.kind}{peer} of {self.bytes} bytes in {self.group[0]}{list(self.group[1])}"


class Recorder:
    """What this process has called so far. `calls` is its log."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._batches = 0
        self._frame: object = None

    def note(self, group: tuple[str, tuple[int, ...]], kind: str, peer: int | None, tensor: Tensor | None) -> Call:
        size = 0 if tensor is None else tensor.numel() * tensor.element_size()
        batch = self._batch()
        number = len(self.calls) if batch is None and kind in ("send", "recv") else None
        self.calls.append(Call(group, kind, peer, size, batch, threading.get_ident(), number))
        return self.calls[-1]

    def _batch(self) -> int | None:
        """Batches reach a process group without coalescing one call after another; their frame tells them apart."""
        frame = sys._getframe(1)
        while frame is not None and frame.f_code is not dist.batch_isend_irecv.__code__:
            frame = frame.f_back  # type: ignore[assignment]
        if frame is None:
            return None
        if frame is not self._frame:
            self._frame = frame  # held, so that no later frame is taken for this one
            self._batches += 1
        return self._batches


class Done:
    """A work that has ended. Waiting for a call outside batches is noted."""

    def __init__(self, recorder: Recorder, call: Call) -> None:
        self.recorder, self.call = recorder, call

    def wait(self, *_: Any) -> bool:
        if self.call.number is not None:
            self.recorder.calls.append(replace(self.call, kind="wait", bytes=0))
        return True


class RecordingGroup(dist.ProcessGroup):
    """Notes calls; knows only those that ditpar and torch's object collectives use, so that any other one fails."""

    def __init__(self, recorder: Recorder, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)
        self.recorder = recorder
        self.ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        self.name = str(options.group_id)
        self.inner = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)

    def getBackendName(self) -> str:
        return BACKEND

    def getGroupName(self) -> str:
        return self.name

    def setGroupName(self, name: str) -> None:
        self.name = name

    group_name = property(getGroupName)

    def _note(self, kind: str, peer: int | None, tensors: Sequence[Tensor]) -> Call:
        (tensor,) = tensors
        return self.recorder.note((self.name, self.ranks), kind, None if peer is None else self.ranks[peer], tensor)

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Done:
        return Done(self.recorder, self._note("send", peer, tensors))

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Done:
        call = self._note("recv", peer, tensors)
        tensors[0].zero_()
        return Done(self.recorder, call)

    def broadcast(self, tensors: Sequence[Tensor], options: Any) -> Any:
        self._note("broadcast", options.rootRank, tensors)
        return self.inner.broadcast(tensors, options)

    def allreduce(self, tensors: Sequence[Tensor], options: Any) -> Any:
        self._note("all_reduce", None, tensors)
        return self.inner.allreduce(tensors, options)

    def allgather(self, parts: Any, tensors: Sequence[Tensor], options: Any) -> Any:
        self._note("all_gather", None, tensors)
        return self.inner.allgather(parts, tensors, options)


_current: list[Recorder] = []


def _create(options: Any, _: Any) -> RecordingGroup:
    return RecordingGroup(_current[0], options)


def start() -> Recorder:
    """Replaces this rank's default process group by one that records. For ranks of a test world only."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port: list[Any] = [store and store.port]
    dist.broadcast_object_list(port, 0)
    dist.destroy_process_group()
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])
    _current[:] = [Recorder()]
    store = store or dist.TCPStore("127.0.0.1", port[0])
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=size)
    return _current[0]


# ---- the check ----


def check(logs: Sequence[Sequence[Call]]) -> list[str]:
    """Why ranks with these logs could fail or deadlock under NCCL; nothing when they cannot.

    Every call of a group comes from one thread of its rank; members of a group issue the same collectives in the same
    order with the same sizes; sends meet receives of their size, batched ones batched ones, in order; a ring goes one
    way round in its group; and when every call, or batch as a whole, waits until its counterparts are issued, all ranks
    reach their end. A group's first use needs all its members, as NCCL makes communicators then. Numbered calls go on at
    once, as on a stream of their pair; they end in issue order, and it is `wait` that waits for their end.
    """
    return [*_threads(logs), *_collectives(logs), *_pairs(logs), *_directions(logs), *_deadlock(logs)]


def _threads(logs: Sequence[Sequence[Call]]) -> Iterator[str]:
    for rank, log in enumerate(logs):
        for group in dict.fromkeys(call.group for call in log):
            threads = {call.thread for call in log if call.group == group}
            if len(threads) > 1:
                yield f"rank {rank} calls {group[0]}{list(group[1])} from {len(threads)} threads"


def _collectives(logs: Sequence[Sequence[Call]]) -> Iterator[str]:
    for group in dict.fromkeys(call.group for log in logs for call in log):
        name = f"{group[0]}{list(group[1])}"
        outside = [rank for rank, log in enumerate(logs) if rank not in group[1] and any(c.group == group for c in log)]
        if outside:
            yield f"rank {outside[0]} calls {name}, of which it is no member"
        mine = {
            rank: [c for c in logs[rank] if c.group == group and not c.p2p and c.kind != "wait"] for rank in group[1]
        }
        first, *others = group[1]
        for rank in others:
            for i, (a, b) in enumerate(zip(mine[first], mine[rank], strict=False)):
                if (a.kind, a.peer, a.bytes) != (b.kind, b.peer, b.bytes):
                    yield f"collective {i} of {name} differs: rank {first} issues {a}, rank {rank} issues {b}"
                    break
            else:
                if len(mine[first]) != len(mine[rank]):
                    counts = f"rank {first} issues {len(mine[first])}, rank {rank} issues {len(mine[rank])}"
                    yield f"collectives of {name} lack a member: {counts}"


def _pairs(logs: Sequence[Sequence[Call]]) -> Iterator[str]:
    queues: dict[Hashable, dict[str, list[Call]]] = defaultdict(lambda: {"send": [], "recv": []})
    for rank, log in enumerate(logs):
        for call in log:
            if call.p2p:
                ends = (rank, call.peer) if call.kind == "send" else (call.peer, rank)
                queues[call.group, ends][call.kind].append(call)
    for (group, (source, target)), queue in queues.items():  # type: ignore[misc]
        name = f"from {source} to {target} in {group[0]}{list(group[1])}"
        for i, (sent, received) in enumerate(zip(queue["send"], queue["recv"], strict=False)):
            if sent.bytes != received.bytes:
                yield f"message {i} {name}: {sent.bytes} bytes sent, {received.bytes} expected"
                break
            if (sent.batch is None) != (received.batch is None):
                yield f"message {i} {name}: batched on one side only, which are different communicators"
                break
        more = len(queue["send"]) - len(queue["recv"])
        if more:
            what = "sent but not received" if more > 0 else "received but not sent"
            yield f"{abs(more)} messages {name} are {what}"


def _directions(logs: Sequence[Sequence[Call]]) -> Iterator[str]:
    """A group's calls run in issue order, so what goes the other way round would wait for what goes this way.

    A batch is a ring's when what comes from some members goes on as far to others, but not from all and to all. Two
    members have no way round: both neighbours are the same.
    """
    ways: dict[Hashable, set[int]] = defaultdict(set)
    for rank, log in enumerate(logs):
        for step in _steps(log):
            for group in dict.fromkeys(c.group for c in step if c.p2p and rank in c.group[1] and len(c.group[1]) > 2):
                ways[group] |= _ways(rank, group[1], [c for c in step if c.group == group])
    for group, found in ways.items():
        if len(found) > 1:
            name, ranks = group  # type: ignore[misc]
            yield f"{name}{list(ranks)} is a ring both ways round; each direction needs a group of its own"


def _ways(rank: int, ranks: tuple[int, ...], step: Step) -> set[int]:
    """Which ways round the group this step sends, 1 or -1; none when it is no step of a ring."""
    here, size = ranks.index(rank), len(ranks)
    to, back = ({(ranks.index(c.peer) - here) % size for c in step if c.kind == kind} for kind in ("send", "recv"))
    onward = {-away % size for away in back}  # what comes from one neighbour goes on to the other
    if step[0].batch is None:
        to = to or onward
    elif to != onward or len(to) == size - 1:
        return set()
    return {{1: 1, size - 1: -1}[away] for away in to & {1, size - 1}}


Step = list[Call]


def _steps(log: Sequence[Call]) -> Iterator[Step]:
    """Calls that start together; each group's communicator is made before its first collective or batch."""
    seen: set[Hashable] = set()
    step: Step = []
    for call in log:
        if step and (call.batch is None or call.batch != step[0].batch):
            yield step
            step = []
        if call.group not in seen and call.kind != "wait" and not (call.p2p and call.batch is None):
            seen.add(call.group)
            if step:
                yield step
                step = []
            yield [Call(call.group, "first use", None, 0)]
        step.append(call)
    if step:
        yield step


def _deadlock(logs: Sequence[Sequence[Call]]) -> Iterator[str]:
    steps = [list(_steps(log)) for log in logs]
    at = [-1] * len(logs)
    issued: Counter[Hashable] = Counter()
    needs: list[list[tuple[Hashable, int, int]]] = [[] for _ in logs]  # (counterpart, its number, its rank)
    streams: dict[Hashable, dict[int, deque[Call]]] = defaultdict(lambda: defaultdict(deque))

    def stream(rank: int, call: Call) -> dict[int, deque[Call]]:
        return streams[call.group, frozenset((rank, call.peer))]

    def pass_on(rank: int, call: Call) -> None:
        """Ends calls of a pair as long as the first ones left are each other's counterparts."""
        ends = stream(rank, call)
        peer = call.peer
        assert peer is not None
        while ends[rank] and ends[peer] and ends[rank][0].kind != ends[peer][0].kind:
            for end in (rank, peer):
                issued["ended", end, ends[end].popleft().number] += 1

    def issue(rank: int) -> None:
        at[rank] += 1
        needs[rank] = []
        for call in steps[rank][at[rank]] if at[rank] < len(steps[rank]) else ():
            if call.number is not None:
                if call.kind == "wait":
                    assert call.peer is not None
                    needs[rank].append((("ended", rank, call.number), 1, call.peer))
                else:
                    stream(rank, call)[rank].append(call)
                    pass_on(rank, call)
                continue
            key, peers = _counterparts(rank, call)
            issued[key] += 1
            needs[rank] += [(other, issued[key], peer) for peer, other in peers]

    def blocked(rank: int) -> list[int]:
        return list(dict.fromkeys(peer for key, number, peer in needs[rank] if issued[key] < number))

    for rank in range(len(logs)):
        issue(rank)
    moved = True
    while moved:
        moved = False
        for rank in range(len(logs)):
            while at[rank] < len(steps[rank]) and not blocked(rank):
                issue(rank)
                moved = True
    waits = {rank: blocked(rank) for rank in range(len(logs)) if at[rank] < len(steps[rank])}
    if not waits:
        return

    def where(rank: int) -> str:
        calls = "; ".join(map(str, steps[rank][at[rank]]))
        return f"rank {rank} at step {at[rank]} ({calls}) waits for {waits[rank]}"

    for rank, peers in waits.items():
        for peer in peers:
            if peer not in waits:
                yield f"deadlock: {where(rank)}, but rank {peer} has ended"
                return
    cycle = _cycle(lambda rank: waits[rank][0], next(iter(waits)))
    yield "deadlock: " + ", ".join(map(where, cycle))


def _counterparts(rank: int, call: Call) -> tuple[Hashable, list[tuple[int, Hashable]]]:
    """What a call counts as, and which peers must have issued what for it to go on."""
    if not call.p2p:
        kind = "first use" if call.kind == "first use" else "collective"
        return (call.group, kind, rank), [(p, (call.group, kind, p)) for p in call.group[1] if p != rank]
    batched, peer = call.batch is not None, call.peer
    assert peer is not None
    ends = (rank, peer) if call.kind == "send" else (peer, rank)
    other = "recv" if call.kind == "send" else "send"
    return (call.group, batched, ends, call.kind), [(peer, (call.group, batched, ends, other))]


def _cycle(following: Callable[[int], int], first: int) -> list[int]:
    path = [first]
    while following(path[-1]) not in path:
        path.append(following(path[-1]))
    return path[path.index(following(path[-1])) :]
