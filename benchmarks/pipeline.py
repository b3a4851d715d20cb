"""PipeFusion over two ranks: against one rank, against what the simulator calls ideal, and with the text in every band.

    python benchmarks/pipeline.py [--quick] [--tokens 4096] [--steps 20] [--patches 2 4 8] [--repeats 3] [--out FILE.json]

As in overhead.py all cells are timed in turn. *ideal* is the simulator's speed-up of the same schedule with free links
and equal stages, units as long as their queries say; *target* is that times the ceiling over 2, where the ceiling is
what two independent processes reach together in the same round. *simulated* is the simulator's time with the unit times
of one traced run, against the untraced runs' time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from overhead import Answer, Cell, Processes
from workload import ENVIRONMENT, TEXT_EACH, TRACED, Load

ALONE = Cell("1 rank x 1 thread", "first")
BOTH = Cell("two independent processes", "world")


def cells(patches: list[int]) -> list[Cell]:
    plans = [Cell(f"pipe=2,patches={m}", "world", plan=f"pipe=2,patches={m}") for m in patches]
    each = [Cell(f"{c.name}, text in each", "world", plan=c.plan, how=TEXT_EACH) for c in plans]
    return [ALONE, BOTH, *plans, *each]


def ideal(load: Load, patches: int, once: bool) -> float:
    """The simulator's speed-up of two equal stages over one, links free."""
    from ditpar.planner.simulate import Costs, by_queries, rounds, simulate
    from ditpar.stage import cut

    text = load.text
    bands = cut.bands(load.tokens, patches, 1, text)
    whole = load.tokens + text
    seconds = by_queries(0.5 / whole, 1.0, text)
    if not once:
        seconds = lambda unit, stage: 0.5 * (unit.rows.size + text) / whole  # noqa: E731
    (request,) = rounds(load.calls, bands)
    return load.calls / simulate(request, 2, Costs(seconds)).seconds


def simulated(load: Load, patches: int, events: list[list[Any]]) -> float:
    """Seconds that the simulator gives for the whole request with the unit times of a traced run."""
    from ditpar.planner.simulate import Costs, rounds, simulate
    from ditpar.stage import cut

    times: dict[tuple[int, str, int], list[float]] = {}
    for stage, mine in enumerate(events):
        waits = [e for e in mine if e.what == "wait"]
        for event in (e for e in mine if e.what == "compute"):
            inside = sum(w.end - w.begin for w in waits if event.begin <= w.begin and w.end <= event.end)
            key = (stage, event.facts["kind"], event.facts["rows"][0])
            times.setdefault(key, []).append((event.end - event.begin - inside) / 1e9)
    median = {key: statistics.median(values) for key, values in times.items()}
    bands = cut.bands(load.tokens, patches, 1, load.text)
    (request,) = rounds(load.calls, bands)
    costs = Costs(lambda unit, stage: median[stage, unit.kind.value, unit.rows.lo])
    return simulate(request, 2, costs).seconds


def measure(processes: Processes, every: list[Cell], load: Load, repeats: int) -> list[dict[str, Any]]:
    seconds: dict[str, list[float]] = {cell.name: [] for cell in every}
    results: dict[str, np.ndarray] = {}
    for repeat in range(-1, repeats):
        for cell in every:
            ran = processes.run(cell, load if repeat >= 0 else Load(load.tokens, 3))
            assert ran is not None
            if repeat >= 0:
                seconds[cell.name].append(ran[0])
                results[cell.name] = ran[1]
    ceiling = [2 * a / b for a, b in zip(seconds[ALONE.name], seconds[BOTH.name], strict=True)]
    rows = []
    for cell in every:
        times = seconds[cell.name]
        work = 2 if cell is BOTH else 1
        speedups = [work * a / t for a, t in zip(seconds[ALONE.name], times, strict=True)]
        row: dict[str, Any] = {"cell": cell.name, "min_s": min(times), "median_s": statistics.median(times)}
        row |= {"speedup": statistics.median(speedups)}
        difference = results[cell.name] - results[ALONE.name]
        row["distance"] = float(np.linalg.norm(difference) / np.linalg.norm(results[ALONE.name]))
        if cell.plan:
            patches = int(cell.plan.rpartition("=")[2])
            best = ideal(load, patches, cell.how != TEXT_EACH)
            shares = [s / (best * c / 2) for s, c in zip(speedups, ceiling, strict=True)]
            least = min(seconds[ALONE.name]) / min(times)
            most = best * min(seconds[ALONE.name]) / min(seconds[BOTH.name])
            row |= {"ideal": best, "of_target": statistics.median(shares), "of_target_of_min": least / most}
            if cell.how != TEXT_EACH:
                traced: Answer | None = processes.run(Cell(cell.name, "world", plan=cell.plan, how=TRACED), load)
                assert traced is not None
                row["simulated_s"] = simulated(load, patches, traced[2])
                row["traced_s"] = traced[0]
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]], load: Load) -> str:
    lines = [
        f"{load.tokens} image tokens, {load.text} text tokens, {load.calls} steps",
        "",
        "| | min s | median s | speedup | ideal | of target | by minima | simulated s | traced s | distance |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        marks = [f"{row[k]:.3f}" if k in row else "" for k in ("ideal", "of_target", "of_target_of_min")]
        marks += [f"{row[k]:.2f}" if k in row else "" for k in ("simulated_s", "traced_s")]
        lines.append(
            f"| {row['cell']} | {row['min_s']:.2f} | {row['median_s']:.2f} | {row['speedup']:.3f} | "
            f"{' | '.join(marks)} | {row['distance']:.0e} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1024 tokens, 6 steps, 2 patches, 2 repeats")
    parser.add_argument("--tokens", type=int, default=4096, help="image tokens, a square number")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--patches", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    options = parser.parse_args()
    if options.quick:
        options.tokens, options.steps, options.patches, options.repeats = 1024, 6, [2], 2
    if int(options.tokens**0.5) ** 2 != options.tokens:
        parser.error(f"--tokens {options.tokens} is not a square number")
    os.environ |= ENVIRONMENT
    load, every = Load(options.tokens, options.steps), cells(options.patches)
    with tempfile.TemporaryDirectory() as folder:
        processes = Processes(Path(folder), every)
        try:
            rows = measure(processes, every, load, options.repeats)
        finally:
            processes.close()
    print(table(rows, load))
    if options.out:
        settings = {"tokens": load.tokens, "text": load.text, "steps": load.calls, "repeats": options.repeats}
        options.out.write_text(json.dumps({"rows": rows, "settings": settings}, indent=1))


if __name__ == "__main__":
    main()
