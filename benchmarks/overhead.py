"""What ditpar costs: host time and dispatches at one rank, and two ranks against what two processes could reach.

    python benchmarks/overhead.py [--quick] [--methods cfg ulysses ring diffusers] [--tokens 1024 4096] [--steps 10]
        [--repeats 5] [--out FILE.json]

All ways to run a request are timed in turn, again and again, so that a busy machine slows all of them alike. The
*ceiling* is what two independent one-thread processes reach together in the same run: cores share caches, memory and
clock, so it is below 2.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from hostcost import host_cost
from workload import ENVIRONMENT, Load, serve


@dataclass(frozen=True)
class Cell:
    """One way to run a request: in which processes, under which plan, guided or not."""

    name: str
    processes: str
    guided: bool = False
    plan: str | None = None
    how: str = ""


CELLS = (
    Cell("1 rank x 1 thread", "first"),
    Cell("1 rank x 1 thread, guided", "first", guided=True),
    Cell("two independent processes", "world"),
    Cell("1 process x 2 threads", "threads"),
    Cell("1 process x 2 threads, guided", "threads", guided=True),
    Cell("cfg=2", "world", guided=True, plan="cfg=2"),
    Cell("ulysses=2", "world", plan="ulysses=2"),
    Cell("ring=2", "world", plan="ring=2"),
    Cell("diffusers ulysses_degree=2", "peer ulysses_degree"),
    Cell("diffusers ring_degree=2", "peer ring_degree"),
)
ALONE, ALONE_GUIDED, BOTH = (cell.name for cell in CELLS[:3])
METHODS = ("cfg", "ulysses", "ring", "diffusers")


def chosen(methods: list[str]) -> list[Cell]:
    """The cells of some methods, and those that they are compared with."""
    return [c for c in CELLS if not (c.plan or c.processes.startswith("peer")) or c.name.startswith(tuple(methods))]


Answer = tuple[float, np.ndarray, Any]


class Processes:
    """The worlds by name; `first` is rank 0 of `world` by itself."""

    def __init__(self, folder: Path, cells: Sequence[Cell]) -> None:
        self.faults: dict[str, str] = {}
        self._all: list[Any] = []
        self._spawn = multiprocessing.get_context("spawn")
        self._folder = folder
        self._lines: dict[str, list[Connection]] = {
            "world": self._start(2, "world"),
            "threads": self._start(1, "", threads=2),
        }
        self._lines["first"] = self._lines["world"][:1]
        for peer in (cell.processes for cell in cells if cell.processes.startswith("peer ")):
            degree = peer.removeprefix("peer ")
            self._lines[peer] = self._start(2, degree, peer=degree)
        for name, lines in self._lines.items():
            if name != "first":
                self._answers(name, lines)

    def _start(self, ranks: int, store: str, threads: int = 1, peer: str | None = None) -> list[Connection]:
        lines = []
        for rank in range(ranks):
            ours, theirs = self._spawn.Pipe()
            meet = str(self._folder / store) if store else ""
            process = self._spawn.Process(target=serve, args=(theirs, rank, meet, threads, peer), daemon=True)
            process.start()
            self._all.append(process)
            theirs.close()
            lines.append(ours)
        return lines

    def _answers(self, name: str, lines: list[Connection]) -> list[Answer]:
        answers = []
        for line in lines:
            try:
                answer = line.recv()
            except EOFError:
                answer = "died"
            if isinstance(answer, str):
                if not name.startswith("peer"):
                    raise RuntimeError(answer)
                self.faults[name] = answer.strip().splitlines()[-1]
                return []
            answers.append(answer)
        return answers

    def run(self, cell: Cell, load: Load) -> Answer | None:
        """Seconds of the slowest rank, its result, and the events of a trace; None when a peer cannot run."""
        if cell.processes in self.faults:
            return None
        lines = self._lines[cell.processes]
        for line in lines:
            line.send((load, cell.guided, cell.plan, cell.how))
        answers = self._answers(cell.processes, lines)
        return max(answers, key=lambda answer: answer[0]) if answers else None

    def close(self) -> None:
        for name, lines in self._lines.items():
            if name != "first" and name not in self.faults:
                for line in lines:
                    line.send(None)
        for process in self._all:
            process.join(5)
            process.kill()


def measure(processes: Processes, cells: list[Cell], load: Load, repeats: int) -> list[dict[str, Any]]:
    """Rows of the table at one number of tokens."""
    seconds: dict[str, list[float]] = {cell.name: [] for cell in cells}
    results: dict[str, np.ndarray] = {}
    for repeat in range(-1, repeats):
        for cell in cells:
            # The first round warms up, with as few steps as it takes.
            ran = processes.run(cell, load if repeat >= 0 else Load(load.tokens, 2))
            if ran and repeat >= 0:
                seconds[cell.name].append(ran[0])
                results[cell.name] = ran[1]
    ceiling = [2 * a / b for a, b in zip(seconds[ALONE], seconds[BOTH], strict=True)]
    rows = []
    for cell in cells:
        times = seconds[cell.name]
        row: dict[str, Any] = {"cell": cell.name, "tokens": load.tokens}
        rows.append(row)
        if not times:
            row["fault"] = processes.faults[cell.processes]
            continue
        alone = ALONE_GUIDED if cell.guided else ALONE
        work = 2 if cell.name == BOTH else 1
        speedups = [work * a / t for a, t in zip(seconds[alone], times, strict=True)]
        fastest = work * min(seconds[alone]) / min(times)
        row |= {
            "min_s": min(times),
            "median_s": statistics.median(times),
            "speedup": statistics.median(speedups),
            "of_ceiling": statistics.median(s / c for s, c in zip(speedups, ceiling, strict=True)),
            "speedup_of_min": fastest,
            "of_ceiling_of_min": fastest / (2 * min(seconds[ALONE]) / min(seconds[BOTH])),
            "distance": float(np.linalg.norm(results[cell.name] - results[alone]) / np.linalg.norm(results[alone])),
        }
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| tokens | | min s | median s | speedup | of the ceiling | by minima | distance |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        if "fault" in row:
            lines.append(f"| {row['tokens']} | {row['cell']} | does not run: {row['fault']} | | | | | |")
            continue
        lines.append(
            f"| {row['tokens']} | {row['cell']} | {row['min_s']:.2f} | {row['median_s']:.2f} | {row['speedup']:.3f} "
            f"| {row['of_ceiling']:.3f} | {row['of_ceiling_of_min']:.3f} | {row['distance']:.0e} |"
        )
    return "\n".join(lines)


def host_line(cost: dict[str, Any]) -> str:
    """The cost at one rank in words."""
    low, high = cost["call_us_quartiles"]
    return (
        f"One rank, plan single, added to stock: {cost['call_us']:+.0f} us (quartiles {low:+.0f} to {high:+.0f}), "
        f"{cost['call_dispatches']:+d} dispatches and {cost['call_functions']:+d} function calls a transformer call "
        f"of {cost['stock_call_us']:.0f} us, {cost['stock_call_dispatches']} dispatches and "
        f"{cost['stock_call_functions']} function calls; {cost['request_us']:+.0f} us, "
        f"{cost['request_dispatches']:+d} dispatches and {cost['request_functions']:+d} function calls a request."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1024 tokens, 4 steps, 2 repeats: to see that it works")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096], help="image tokens, square numbers")
    parser.add_argument("--steps", type=int, default=10, help="transformer calls of a request; guided: half the steps")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    options = parser.parse_args()
    if options.quick:
        options.tokens, options.steps, options.repeats = [1024], 4, 2
    if bad := [n for n in options.tokens if int(n**0.5) ** 2 != n]:
        parser.error(f"--tokens {bad[0]} is not a square number")
    if options.steps < 2 or options.steps % 2:
        parser.error("--steps must be even: a guided step is two calls")

    os.environ |= ENVIRONMENT
    cost = host_cost(repeats=5 if options.quick else 40)
    print(host_line(cost), end="\n\n", flush=True)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        cells = chosen(options.methods)
        processes = Processes(Path(folder), cells)
        try:
            for tokens in options.tokens:
                rows += measure(processes, cells, Load(tokens, options.steps), options.repeats)
        finally:
            processes.close()
    print(table(rows))
    if options.out:
        settings = {"steps": options.steps, "repeats": options.repeats}
        options.out.write_text(json.dumps({"one_rank": cost, "two_ranks": rows, "settings": settings}, indent=1))


if __name__ == "__main__":
    main()
