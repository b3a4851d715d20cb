"""Where the time of one attention site goes: packing, exchanging, attention, unpacking, with two ranks of one thread.

    python benchmarks/site.py [--methods ulysses ring] [--tokens 1024 4096] [--repeats 100] [--out FILE.json]

Next to attention over all tokens on one rank alone, and to the merge of two partial results alone. `DITPAR_TRANSPORT=gloo`
shows the same without shared memory. Both ranks compute, so what they take from each other is in the figures.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections import defaultdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from workload import ENVIRONMENT, TEXT_TOKENS

HEADS, HEAD_DIM, RANKS = 4, 64, 2
METHODS = ("ulysses", "ring")
Times = dict[str, list[float]]
"""Microseconds of each part, one a repeat."""


class Watch:
    """Sums up the time between marks, by part."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = defaultdict(float)
        self.began = self.last = time.perf_counter()

    def mark(self, part: str) -> None:
        """What went on since the last mark was `part`."""
        now = time.perf_counter()
        self.parts[part] += (now - self.last) * 1e6
        self.last = now

    def total(self) -> float:
        return (self.last - self.began) * 1e6


def ulysses_site(group: Any, q: Any, k: Any, v: Any, watch: Watch) -> None:
    """One site under Ulysses; its own parts are told apart by when it calls the group and the attention."""
    import torch.nn.functional as F

    from ditpar.attention.ulysses import ulysses_attend

    before, after = iter(("pack", "pack back")), iter(("exchange", "exchange back"))
    exchange = group.exchange

    def timed_exchange(*args: Any) -> None:
        watch.mark(next(before))
        exchange(*args)
        watch.mark(next(after))

    def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
        watch.mark("views")
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)
        watch.mark("attention")
        return out

    group.exchange = timed_exchange
    ulysses_attend(group, [q.shape[1]] * RANKS, q, k, v, None, attend)
    group.exchange = exchange
    watch.mark("unpack")


def ring_site(group: Any, q: Any, k: Any, v: Any, watch: Watch) -> None:
    """One site under ring. What follows the wait for the last block is attention to it, and the merge."""
    from ditpar.attention.ring import ring_attend

    shift = group.shift

    class Timed:
        def __init__(self, work: Any) -> None:
            self.work = work

        def wait(self) -> None:
            watch.mark("attention to own block")
            self.work.wait()
            watch.mark("wait for a block")

    def timed_shift(*args: Any) -> list[Timed]:
        watch.mark("pack")
        works = [Timed(work) for work in shift(*args)]
        watch.mark("send")
        return works

    group.shift = timed_shift
    ring_attend(group, [q.shape[1]] * RANKS, q, k, v, None, None)
    group.shift = shift
    watch.mark("attention to a block, merge")


def alone(tokens: int, repeats: int) -> dict[str, Times]:
    """Attention over all tokens of all heads, and one merge of a rank's rows, on this rank."""
    import torch
    import torch.nn.functional as F

    from ditpar.kernels.merge import merge

    q, k, v = (torch.randn(1, tokens, HEADS, HEAD_DIM).transpose(1, 2) for _ in range(3))
    a, b = (x[:, :, : tokens // RANKS] for x in (q.clone(), k))
    lse = torch.randn(1, HEADS, tokens // RANKS)
    times: Times = {"attention": [], "merge of half the rows": []}
    for _ in range(repeats):
        watch = Watch()
        F.scaled_dot_product_attention(q, k, v)
        watch.mark("attention")
        merge(a, lse, b, lse)
        watch.mark("merge of half the rows")
        for part, value in watch.parts.items():
            times[part].append(value)
    return {"one rank": times}


def rank_main(line: Connection, rank: int, store: str, methods: list[str], tokens: list[int], repeats: int) -> None:
    """One rank: sends, for each number of tokens, the times of each method."""
    import torch
    import torch.distributed as dist

    from ditpar.mesh import build_mesh
    from ditpar.plan import Plan

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    sites = {"ulysses": ulysses_site, "ring": ring_site}
    meshes = {method: build_mesh(Plan.parse(f"{method}={RANKS}"), torch.device("cpu")) for method in methods}
    for count in tokens:
        rows = (count + TEXT_TOKENS) // RANKS
        q, k, v = (torch.randn(1, rows, HEADS, HEAD_DIM) for _ in range(3))
        times: dict[str, Times] = {method: defaultdict(list) for method in methods}
        warm_up = 5
        for repeat in range(-warm_up, repeats):
            for method in methods:
                dist.barrier()
                watch = Watch()
                sites[method](getattr(meshes[method], method), q, k, v, watch)
                if repeat >= 0:
                    for part, value in {**watch.parts, "total": watch.total()}.items():
                        times[method][part].append(value)
        # Both ranks at once, as under a plan: neither has the machine's caches and memory to itself.
        dist.barrier()
        line.send(alone(rows * RANKS, repeats) | {method: dict(parts) for method, parts in times.items()})
    dist.destroy_process_group()


def run(methods: list[str], tokens: list[int], repeats: int) -> list[dict[str, Any]]:
    """Rows of the table: minima and medians of both ranks' times, and the share of the site's total."""
    spawn = multiprocessing.get_context("spawn")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(RANKS):
            ours, theirs = spawn.Pipe()
            args = (theirs, rank, str(Path(folder) / "store"), methods, tokens, repeats)
            process = spawn.Process(target=rank_main, args=args, daemon=True)
            process.start()
            theirs.close()
            ranks.append((ours, process))
        for count in tokens:
            answers = [line.recv() for line, _ in ranks]
            for method, parts in answers[0].items():
                times = {part: [*parts[part], *answers[1][method][part]] for part in parts}
                whole = statistics.median(times["total"]) if "total" in times else None
                for part, values in times.items():
                    low, middle, high = statistics.quantiles(values, n=4)
                    share = middle / whole if whole else None
                    rows.append({"tokens": count, "method": method, "part": part, "min_us": min(values)})
                    rows[-1] |= {"median_us": middle, "quartiles_us": [low, high], "share": share}
        for _, process in ranks:
            process.join(10)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = ["| tokens | | part | min us | median us | quartiles | share |", "| --- " * 7 + "|"]
    for row in rows:
        low, high = row["quartiles_us"]
        share = "" if row["share"] is None else f"{row['share']:.1%}"
        spread = f"{row['min_us']:.0f} | {row['median_us']:.0f} | {low:.0f} to {high:.0f}"
        lines.append(f"| {row['tokens']} | {row['method']} | {row['part']} | {spread} | {share} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096], help="image tokens, even numbers")
    parser.add_argument("--repeats", type=int, default=100, help="at least 2")
    parser.add_argument("--out", type=Path, help="write the table as JSON")
    options = parser.parse_args()
    if options.repeats < 2 or any(n < 2 or n % RANKS for n in options.tokens):
        parser.error("--repeats must be at least 2 and --tokens even")
    os.environ |= ENVIRONMENT
    rows = run(options.methods, options.tokens, options.repeats)
    print(table(rows))
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
