"""Two ranks, each in a network namespace of its own, and what they can be asked to time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import statistics
import time
import traceback
from collections import defaultdict
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
from netlink import DEVICE, enter
from workload import ENVIRONMENT, Load, pipeline, request

PATIENCE_S = 240
"""Seconds after which a rank that does not answer is given up."""
CALM_S = 2
"""Seconds to wait at most for other work on the machine to pause."""
Units = dict[tuple[str, int], float]
"""Seconds that a stage computes on a unit, by kind and part."""


@dataclass(frozen=True)
class Ran:
    """One rank's part of a request.

    Attributes:
        sent: bytes by method.
        units: median seconds of its stage's units, if it was traced.
        between: seconds a step that its stage neither computes units nor waits.
    """

    seconds: float
    sent: dict[str, int]
    units: Units
    between: float = 0.0


class Ranks:
    """Both ranks; each question is put to both at once."""

    def __init__(self, namespaces: list[str], store: Path) -> None:
        os.environ |= ENVIRONMENT | {"GLOO_SOCKET_IFNAME": DEVICE, "OMP_NUM_THREADS": "1"}
        spawn = multiprocessing.get_context("spawn")
        self._processes, self._lines = [], []
        for rank, namespace in enumerate(namespaces):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(theirs, rank, namespace, str(store)), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._lines.append(ours)

    def ask(self, what: str, *args: Any) -> list[Any]:
        """Both ranks' answers. Raises RuntimeError with the traceback of a rank that failed."""
        for line in self._lines:
            line.send((what, args))
        answers = []
        for rank, line in enumerate(self._lines):
            if not line.poll(PATIENCE_S):
                raise RuntimeError(f"rank {rank} did not answer {what}{args} within {PATIENCE_S} s")
            try:
                ok, answer = line.recv()
            except EOFError:
                raise RuntimeError(f"rank {rank} died during {what}{args}") from None
            if not ok:
                raise RuntimeError(f"rank {rank}: {answer}")
            answers.append(answer)
        return answers

    def ask_when_calm(self, what: str, *args: Any) -> list[Any]:
        """As `ask`, once other work leaves the machine alone, or `CALM_S` later."""
        end = time.monotonic() + CALM_S
        while time.monotonic() < end and psutil.cpu_percent(0.2) > 25:
            pass
        return self.ask(what, *args)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


class _Rank:
    """What a rank does when it is asked; the parent names the method."""

    def __init__(self) -> None:
        self.pipe = pipeline()

    def ready(self) -> None:
        pass

    def alone(self, load: Load) -> float:
        """Seconds of a request that this rank computes by itself, the other rank doing the same meanwhile."""
        return self._timed(load)

    def run(self, load: Load, plan: str, traced: bool) -> Ran:
        """This rank's part of a request."""
        import ditpar

        ditpar.parallelize(self.pipe, plan)
        try:
            engine = self.pipe._ditpar
            if engine.mesh.pipe.channels or engine.mesh.sequence.channels:
                raise RuntimeError("the ranks talk through shared memory, not over the link")
            engine.traces = traced
            seconds = self._timed(load)
            sent = {name: count.bytes for name, count in engine.mesh.counters.items()}
            if not traced:
                return Ran(seconds, sent, {})
            return Ran(seconds, sent, *_units(engine.events[engine.rank]))
        finally:
            ditpar.restore(self.pipe)

    def _timed(self, load: Load) -> float:
        import torch.distributed as dist

        call = request(load, guided=False)
        dist.barrier()
        began = time.perf_counter()
        self.pipe(**call)
        return time.perf_counter() - began

    def wire(self, size: int) -> tuple[float, float]:
        """(bytes a second, latency in seconds): an exchange of `size` bytes, and of four; both directions at once."""
        large, small = self._exchanges(size, 3), self._exchanges(4, 100)
        latency = statistics.median(small)
        return size / (min(large) - latency), latency

    def _exchanges(self, size: int, times: int) -> list[float]:
        import torch
        import torch.distributed as dist

        other, found = 1 - dist.get_rank(), []
        ours, theirs = torch.zeros(size // 4), torch.zeros(size // 4)
        for _ in range(times):
            dist.barrier()
            began = time.perf_counter()
            ops = [dist.P2POp(dist.irecv, theirs, other), dist.P2POp(dist.isend, ours, other)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            found.append(time.perf_counter() - began)
        return found

    def block(self, rows: int, heads: int, dim: int) -> float:
        """Seconds of ring attention to one block of keys."""
        import torch
        import torch.distributed as dist

        from ditpar.attention.local import attend_lse

        q, k, v = torch.randn(3, 1, heads, rows, dim)
        times = []
        dist.barrier()
        for _ in range(30):
            began = time.perf_counter()
            attend_lse(q, k, v, None, None)
            times.append(time.perf_counter() - began)
        return statistics.median(times)


def _units(events: list[Any]) -> tuple[Units, float]:
    """Of a stage's trace: seconds of its units without the waits in them, and seconds a step between units."""
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    waits = [e for e in events if e.what == "wait"]
    units = [e for e in events if e.what == "compute"]
    for unit in units:
        inside = sum(w.end - w.begin for w in waits if unit.begin <= w.begin and w.end <= unit.end)
        found[unit.facts["kind"], int(unit.name.rsplit(" ", 1)[1])].append((unit.end - unit.begin - inside) / 1e9)
    ends = units[0].begin, units[-1].end
    outside = sum(w.end - w.begin for w in waits if ends[0] <= w.begin and w.end <= ends[1])
    outside -= sum(w.end - w.begin for w in waits for u in units if u.begin <= w.begin and w.end <= u.end)
    idle = ends[1] - ends[0] - sum(u.end - u.begin for u in units) - outside
    steps = 1 + max(u.facts["step"] for u in units)
    return {key: statistics.median(times) for key, times in found.items()}, max(idle, 0) / 1e9 / steps


def _serve(line: Connection, rank: int, namespace: str, store: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    try:
        enter(namespace)
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        asked = _Rank()
        while True:
            what, args = line.recv()
            line.send((True, getattr(asked, what)(*args)))
    except EOFError:
        return  # the parent has ended
    except Exception:  # noqa: BLE001  (whatever it is, the parent reports it)
        line.send((False, traceback.format_exc()))
