"""PipeFusion, Ulysses and ring over a slow link: measured, and predicted from compute, bytes and the link.

    sudo python benchmarks/slowlink.py [--rates 1e9 1e8] [--tokens 1024] [--minutes 5] [--plot FILE.png]
        [--out FILE.json]

Two ranks with one thread each, in two network namespaces that a virtual link joins, each end limited by a token bucket.
They share no memory, so ditpar sends everything through gloo and that link. Needs Linux, root, `ip` and `tc`. All ways
to run a request are timed in turn, again and again until the time is up, if possible while nothing else runs; each
figure is the fastest of them.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import chart
from netlink import NetLink, NetlinkError
from slowranks import Ran, Ranks, Units
from workload import TEXT_TOKENS, Load

from ditpar.planner.simulate import Costs, Wire, rounds, simulate
from ditpar.stage.cut import bands

LAYERS, HEADS, HEAD_DIM, CHANNELS, ELEMENT = 8, 4, 64, 64, 4
WIDTH = HEADS * HEAD_DIM
PIPES = {"pipe=2,patches=2": 2, "pipe=2,patches=4": 4}
PLANS = (*PIPES, "ulysses=2", "ring=2")
PROBE_S = 0.3
"""Seconds that the exchange which measures the link takes."""


@dataclass
class Compute:
    """What computing takes without a limit of the link; the fastest of all repeats.

    Attributes:
        step: seconds of a step on one rank, the other computing one too.
        block: seconds of ring attention to one block.
        units: of each stage, by plan.
        between: seconds a step between the units, of each stage, by plan.
    """

    step: float = float("inf")
    block: float = float("inf")
    units: dict[str, list[Units]] = field(default_factory=dict)
    between: dict[str, list[float]] = field(default_factory=dict)

    def learn(self, plan: str, ran: list[Ran]) -> None:
        """Takes in a traced request."""
        before = self.units.get(plan, [r.units for r in ran])
        self.units[plan] = [{k: min(u[k], r.units[k]) for k in u} for u, r in zip(before, ran, strict=True)]
        between = self.between.get(plan, [r.between for r in ran])
        self.between[plan] = [min(b, r.between) for b, r in zip(between, ran, strict=True)]


def sizes(tokens: int) -> tuple[int, int]:
    """Bytes of the activations of all tokens (X), and of the latents."""
    return (tokens + TEXT_TOKENS) * WIDTH * ELEMENT, tokens * CHANNELS * ELEMENT


def expected_bytes(plan: str, load: Load) -> list[dict[str, int]]:
    """What each rank sends in a request, by method: the formulas of docs/methods.md for two ranks."""
    x, latents = sizes(load.tokens)
    if plan in PIPES:
        # Once a step along the chain; back around the ring but for the last step, whose result goes to all.
        return [{"pipe": load.calls * x}, {"pipe": latents, "pipe_back": (load.calls - 1) * latents}]
    method = plan.partition("=")[0]
    return [{method: load.calls * LAYERS * x, "sequence": load.calls * latents // 2}] * 2


def predicted(plan: str, load: Load, compute: Compute, wire: Wire) -> float:
    """Seconds of a step."""
    x, latents = sizes(load.tokens)

    def transfer(size: float) -> float:
        return size / wire.bandwidth + wire.latency

    if plan in PIPES:
        return (_simulated(plan, load, compute, wire) + transfer(latents)) / load.calls
    gather = transfer(latents / 2)
    if plan == "ulysses=2":  # q, k and v one way, the result back: nothing else happens meanwhile
        return compute.step / 2 + LAYERS * (transfer(x * 3 / 4) + transfer(x / 4)) + gather
    # Ring: the other rank's keys and values come while the own block is used.
    return compute.step / 2 + LAYERS * max(0.0, transfer(x) - compute.block) + gather


def _simulated(plan: str, load: Load, compute: Compute, wire: Wire) -> float:
    parts = bands(load.tokens, PIPES[plan], lead=TEXT_TOKENS)
    (rounds_,) = rounds(load.calls, parts, warmup=1)
    costs = Costs(
        seconds=lambda unit, stage: compute.units[plan][stage][unit.kind.value, unit.part],
        overhead=max(compute.between[plan]),
        wires=wire,
        chain_bytes=lambda unit: (unit.rows.size + TEXT_TOKENS * unit.lead) * WIDTH * ELEMENT,
        ring_bytes=lambda rows: rows.size * CHANNELS * ELEMENT,
    )
    return simulate(rounds_, 2, costs).seconds


def calls(plan: str, rate: float | None, most: int) -> int:
    """Steps of a request: fewer where they are slow."""
    if plan in PIPES:
        return most
    return max(most // (2 if rate is None or rate > 3e8 else 4), 2)


class Benchmark:
    """The measurements of one run.

    Attributes:
        seconds: of the fastest request, by plan and rate.
        wires: the link as measured, by rate; the fastest of all repeats.
    """

    def __init__(self, link: NetLink, ranks: Ranks, options: argparse.Namespace) -> None:
        self.link, self.ranks, self.options = link, ranks, options
        self.compute = Compute()
        self.repeats = 0
        self.seconds: dict[tuple[str, float | None], list[float]] = {}
        self.wires: dict[float | None, Wire] = {}

    def measure(self) -> None:
        short = Load(self.options.tokens, 2)
        for plan in PLANS:  # to warm up
            self.ranks.ask("run", short, plan, False)
        self.ranks.ask("alone", short)
        end = time.monotonic() + self.options.minutes * 60
        while not self.repeats or time.monotonic() < end:
            for rate in (None, *self.options.rates):
                self._measure_at(rate)
            self.repeats += 1

    def _measure_at(self, rate: float | None) -> None:
        self.link.limit(rate)
        tokens, most = self.options.tokens, self.options.steps
        found = self.ranks.ask("wire", int((rate or 2e9) / 8 * PROBE_S) // 4 * 4)
        wire = Wire(latency=min(latency for _, latency in found), bandwidth=min(speed for speed, _ in found))
        old = self.wires.get(rate, wire)
        self.wires[rate] = Wire(min(old.latency, wire.latency), max(old.bandwidth, wire.bandwidth))
        if rate is None:
            step = max(self.ranks.ask_when_calm("alone", Load(tokens, most // 2))) / (most // 2)
            block = max(self.ranks.ask_when_calm("block", (tokens + TEXT_TOKENS) // 2, HEADS, HEAD_DIM))
            self.compute.step = min(self.compute.step, step)
            self.compute.block = min(self.compute.block, block)
            for plan in PIPES:
                load = Load(tokens, most)
                self.compute.learn(plan, self.ranks.ask_when_calm("run", load, plan, True))
        for plan in PLANS:
            load = Load(tokens, calls(plan, rate, most))
            ran = self.ranks.ask_when_calm("run", load, plan, False)
            check_bytes(plan, load, ran)
            self.seconds.setdefault((plan, rate), []).append(max(r.seconds for r in ran) / load.calls)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Of the table."""
        for (plan, rate), seconds in self.seconds.items():
            load = Load(self.options.tokens, calls(plan, rate, self.options.steps))
            guess = predicted(plan, load, self.compute, self.wires[rate])
            sent = [sum(by.values()) for by in expected_bytes(plan, load)]
            yield {
                "rate": rate,
                "plan": plan,
                "steps": load.calls,
                "measured_s": min(seconds),
                "all_measured_s": seconds,
                "predicted_s": guess,
                "ratio": min(seconds) / guess,
                "bytes_a_step": [round(n / load.calls) for n in sent],
            }


def check_bytes(plan: str, load: Load, ran: list[Ran]) -> None:
    """Raises RuntimeError when a rank sent anything but what the formulas say."""
    for rank, (want, one) in enumerate(zip(expected_bytes(plan, load), ran, strict=True)):
        sent = {name: count for name, count in one.sent.items() if name != "control" and count}
        if sent != want:
            raise RuntimeError(f"{plan}: rank {rank} sent {sent} bytes; the formula says {want}")


def named(rate: float | None) -> str:
    if rate is None:
        return "no limit"
    return f"{rate / 1e9:g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:g} Mbit/s"


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| link | plan | steps | measured s | predicted s | ratio | MB a step from rank 0, 1 |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        sent = ", ".join(f"{n / 1e6:.3f}" for n in row["bytes_a_step"])
        lines.append(
            f"| {named(row['rate'])} | {row['plan']} | {row['steps']} | {row['measured_s']:.3f} "
            f"| {row['predicted_s']:.3f} | {row['ratio']:.2f} | {sent} |"
        )
    return "\n".join(lines)


def report(found: Benchmark) -> str:
    """What the predictions are made of, in words."""
    lines = [
        f"{found.repeats} repeats. A step takes {found.compute.step:.3f} s of computing when both ranks compute one, "
        f"ring attention to a block {found.compute.block * 1e3:.1f} ms."
    ]
    for plan, stages in found.compute.units.items():
        for stage, units in enumerate(stages):
            each = ", ".join(f"{kind} {part}: {s * 1e3:.0f}" for (kind, part), s in units.items())
            between = found.compute.between[plan][stage] * 1e3
            lines.append(f"{plan}, stage {stage}: units take ms {each}; {between:.1f} ms a step between them.")
    for rate, wire in found.wires.items():
        speed = wire.bandwidth * 8 / 1e6
        lines.append(f"Link, {named(rate)}: {speed:.1f} Mbit/s through gloo, latency {wire.latency * 1e6:.0f} us.")
    return "\n".join(lines)


def plot(path: Path, found: Benchmark, rows: list[dict[str, Any]]) -> None:
    """Seconds per step over the link's rate: lines as predicted, marks as measured.

    The latency is that of the slowest link measured; the steps are those of the fastest.
    """
    latency = found.wires[min(r for r in found.wires if r)].latency
    load = Load(found.options.tokens, found.options.steps)
    rates = [10 ** (7 + i / 20) for i in range(81)]
    series = [
        chart.Series(
            plan,
            [(rate, predicted(plan, load, found.compute, Wire(latency, rate / 8))) for rate in rates],
            [
                (found.wires[row["rate"]].bandwidth * 8, row["measured_s"])
                for row in rows
                if row["plan"] == plan and row["rate"]
            ],
        )
        for plan in PLANS
    ]
    chart.draw(
        path,
        chart.Axis("link, each direction; lines: predicted, dots: measured", [10**n for n in range(7, 12)], named),
        chart.Axis("seconds per step", [0.1, 0.2, 0.5, 1, 2, 5, 10], lambda s: f"{s:g}"),
        series,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e9, 1e8], help="bits a second of each direction")
    parser.add_argument("--tokens", type=int, default=1024, help="image tokens, a square number")
    parser.add_argument("--steps", type=int, default=8, help="of a request; fewer where they are slow")
    parser.add_argument("--minutes", type=float, default=5.0, help="for measuring; once in any case")
    parser.add_argument("--plot", type=Path, help="draw seconds per step over the link's rate")
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    options = parser.parse_args()
    if int(options.tokens**0.5) ** 2 != options.tokens:
        parser.error(f"--tokens {options.tokens} is not a square number")
    if options.steps < 4 or min(options.rates) < 1e6:
        parser.error("--steps must be at least 4, --rates at least 1e6")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what follows is cleaned up
    try:
        with NetLink() as link, tempfile.TemporaryDirectory() as folder:
            ranks = Ranks(link.names, Path(folder) / "store")
            try:
                ranks.ask("ready")
                found = Benchmark(link, ranks, options)
                found.measure()
            finally:
                ranks.close()
    except NetlinkError as error:
        sys.exit(f"slowlink: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    rows = list(found.rows())
    print(report(found), table(rows), sep="\n\n")
    if options.out:
        options.out.write_text(json.dumps({"rows": rows, "text": report(found)}, indent=1))
    if options.plot:
        plot(options.plot, found, rows)


if __name__ == "__main__":
    main()
