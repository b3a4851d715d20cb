"""What PipeFusion does to pictures: each plan against one device, and against one device with fewer steps.

    python benchmarks/quality.py [--prompts 8] [--patches 2 4 8] [--warmup 1 2 3] [--out FILE.json] [--picture FILE.png]

The bundled model with its defaults, one thread a rank. Plans take turns, prompt by prompt, so that a busy machine slows
all of them alike; a time is that of the request for latents and of decoding them, on one thread of this process.
Beside it stands the CPU time of the busiest rank and of decoding, which other work on the machine hardly changes: what
the picture would take if no rank ever waited.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from diffusers import AutoencoderKL, FluxPipeline
from sheet import draw
from torch import Tensor

import ditpar
from ditpar.gang.modelfolder import DEFAULT_MODEL, read_model

MODEL = read_model(DEFAULT_MODEL)
FOLDER = Path(MODEL.path)
STEPS: int = MODEL.defaults["num_inference_steps"]
SINGLE = "single"
EXACT = ("cfg=2", f"pipe=2,warmup={STEPS}")
SAME = (("pipe=2,patches=3", "pipe=3,patches=3"), ("pipe=2,patches=2", "cfg=2,pipe=2,patches=2"))
"""Plans whose results must agree."""
FEWER = (13, 20)
SHOWN = 4
"""Prompts in the picture, and those whose drift is followed step by step."""
GAIN = 10
"""Times that differences are enlarged in the picture."""


@dataclass
class Row:
    """A way to make pictures, and what came of each prompt, in the prompts' order."""

    name: str
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    latents: list[Tensor] = field(default_factory=list)
    pictures: list[Tensor] = field(default_factory=list)

    def summary(self, reference: Row) -> dict[str, Any]:
        pairs = list(zip(self.pictures, reference.pictures, strict=True))
        levels = [psnr(a, b) for a, b in pairs]
        return {
            "plan": self.name,
            "psnr": levels,
            "latents": [distance(a, b) for a, b in zip(self.latents, reference.latents, strict=True)],
            "seconds": self.seconds,
            "cpu": self.cpu,
            "speedup": speedup(self, reference),
            "by_minima": min(reference.seconds) / min(self.seconds),
        }


def speedup(row: Row, reference: Row) -> float:
    """Median over the prompts, whose two pictures were made one soon after the other."""
    return statistics.median(a / b for a, b in zip(reference.seconds, row.seconds, strict=True))


def equal_steps(row: Row, one: Row) -> tuple[int, int]:
    """Steps that one device does in the row's time, and in the CPU time of its busiest rank."""
    work = statistics.median(a / b for a, b in zip(row.cpu, one.cpu, strict=True))
    return round(STEPS / speedup(row, one)), round(STEPS * work)


def cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def distance(a: Tensor, b: Tensor) -> float:
    """Relative L2 of a to b."""
    return float((a - b).norm() / b.norm())


def psnr(a: Tensor, b: Tensor) -> float:
    """In dB, of pictures with values in 0..1; infinite for equal ones."""
    error = float((a.double() - b.double()).square().mean())
    return -10 * math.log10(error) if error else math.inf


class Bench:
    """Gangs by plan, and the VAE that decodes what they make."""

    def __init__(self, prompts: list[str]) -> None:
        self.prompts = prompts
        self.vae = AutoencoderKL.from_pretrained(FOLDER / "vae", torch_dtype=torch.float32)

    def latents(self, pipe: Any, index: int, **more: Any) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        result: Tensor = pipe(self.prompts[index], generator=generator, output_type="latent", **more).images
        return result

    def decode(self, latents: Tensor) -> Tensor:
        """`[batch, tokens, channels]` to a picture `[3, height, width]` with values in 0..1, as FluxPipeline does it."""
        scale = 2 ** (len(self.vae.config.block_out_channels) - 1)
        height, width = MODEL.defaults["height"], MODEL.defaults["width"]
        z = FluxPipeline._unpack_latents(latents, height, width, scale)
        z = z / self.vae.config.scaling_factor + self.vae.config.shift_factor
        with torch.inference_mode():
            return (self.vae.decode(z, return_dict=False)[0][0] / 2 + 0.5).clamp(0, 1)

    def make(self, pipe: Any, row: Row, index: int, **more: Any) -> None:
        ranks = [psutil.Process(rank["pid"]) for rank in pipe.memory()]
        spent, own, begun = [cpu(rank) for rank in ranks], time.process_time(), time.perf_counter()
        latents = self.latents(pipe, index, **more)
        picture = self.decode(latents)
        row.seconds.append(time.perf_counter() - begun)
        busiest = max(cpu(rank) - before for rank, before in zip(ranks, spent, strict=True))
        row.cpu.append(busiest + time.process_time() - own)
        row.latents.append(latents)
        row.pictures.append(picture)

    def in_turn(self, plans: list[str]) -> dict[str, Row]:
        """All plans, prompt by prompt, after a short request of each to warm up."""
        rows = {plan: Row(plan) for plan in plans}
        with ExitStack() as stack:
            gangs = {plan: stack.enter_context(load(plan)) for plan in plans}
            for pipe in gangs.values():
                self.decode(self.latents(pipe, 0, num_inference_steps=2))
            for index, prompt in enumerate(self.prompts):
                for plan, pipe in gangs.items():
                    self.make(pipe, rows[plan], index)
                print(f"{prompt}: {', '.join(f'{row.seconds[-1]:.1f}' for row in rows.values())} s", flush=True)
        return rows

    def fewer(self, counts: list[int]) -> dict[int, Row]:
        """One device with fewer steps."""
        rows = {count: Row(f"{SINGLE}, {count} steps") for count in counts}
        with load(SINGLE) as pipe:
            self.latents(pipe, 0, num_inference_steps=2)
            for index in range(len(self.prompts)):
                for count, row in rows.items():
                    self.make(pipe, row, index, num_inference_steps=count)
        return rows

    def same(self, plan: str, row: Row) -> float:
        """The largest distance of a plan's latents to those of a row, over the first prompts."""
        with load(plan) as pipe:
            return max(distance(self.latents(pipe, i), row.latents[i]) for i in range(min(SHOWN, len(self.prompts))))

    def along(self, plan: str, rows: Row) -> list[list[Tensor]]:
        """Latents after each step, for each of the first prompts. Looking at them must not change them."""

        def look(_: Any, __: int, ___: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
            seen.append(tensors["latents"].clone())
            return {}

        found = []
        with load(plan) as pipe:
            for index in range(min(SHOWN, len(self.prompts))):
                seen: list[Tensor] = []
                end = self.latents(pipe, index, callback_on_step_end=look)
                if (off := distance(end, rows.latents[index])) > 1e-5:
                    raise SystemExit(f"{plan}: with a callback the latents are {off:.1e} from those without")
                found.append(seen)
        return found


def load(plan: str) -> Any:
    pipe = ditpar.load(plan=plan, threads=1, device="cpu", quiet=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def table(summaries: list[dict[str, Any]], steps: dict[str, tuple[int, int]]) -> str:
    lines = [
        "| | PSNR mean | worst | latents | min s | median s | speed-up | by minima | CPU s | steps: by time | by CPU |",
        "|" + " --- |" * 11,
    ]
    for s in summaries:
        finite = [level for level in s["psnr"] if math.isfinite(level)]
        levels = f"{statistics.mean(finite):.1f} | {min(finite):.1f}" if finite else "equal | equal"
        times = f"{min(s['seconds']):.2f} | | |"
        after = "| "
        if s["plan"] in steps:  # made in turn with one device, so that times compare
            times = f"{min(s['seconds']):.2f} | {statistics.median(s['seconds']):.2f} "
            times += f"| {s['speedup']:.2f} | {s['by_minima']:.2f}"
            after = "{} | {}".format(*steps[s["plan"]])
        cpu_seconds = statistics.median(s["cpu"])
        lines.append(
            f"| {s['plan']} | {levels} | {statistics.mean(s['latents']):.1e} | {times} | {cpu_seconds:.2f} | {after} |"
        )
    return "\n".join(lines)


def drift(bench: Bench, rows: dict[str, Row], plans: list[str]) -> dict[str, list[float]]:
    """Mean distance of the latents after each step to those of one device."""
    truth = bench.along(SINGLE, rows[SINGLE])
    found = {}
    for plan in plans:
        seen = bench.along(plan, rows[plan])
        pairs = [[distance(a, b) for a, b in zip(*ways, strict=True)] for ways in zip(seen, truth, strict=True)]
        found[plan] = [statistics.mean(step) for step in zip(*pairs, strict=True)]
    return found


def drift_table(found: dict[str, list[float]]) -> str:
    steps = [1, 2, 3, 4, 6, 8, 12, 16, 20, 22, 23, STEPS]
    lines = [f"| after step | {' | '.join(map(str, steps))} |", f"|{' --- |' * (len(steps) + 1)}"]
    for plan, values in found.items():
        lines.append(f"| {plan} | {' | '.join(f'{values[n - 1]:.1e}' for n in steps)} |")
    return "\n".join(lines)


def sheet(path: Path, bench: Bench, rows: dict[str, Row], fewer: Row, plans: list[str]) -> None:
    """One device, some plans and fewer steps side by side, then the differences to one device."""
    truth = rows[SINGLE].pictures[:SHOWN]
    columns = [(f"one device, {STEPS} steps", truth)]
    others = [*(rows[plan] for plan in plans), fewer]
    columns += [(row.name, row.pictures[:SHOWN]) for row in others]
    for row in others:
        gaps = [((a - b).abs() * GAIN).clamp(0, 1) for a, b in zip(row.pictures, truth, strict=False)]
        columns.append((f"difference x {GAIN}: {row.name}", gaps))
    draw(path, columns, bench.prompts[:SHOWN])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8, help="the first ones of the model's list; seeds 0, 1, ...")
    parser.add_argument("--patches", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--warmup", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, help="all figures, as JSON")
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()

    torch.set_num_threads(1)
    bench = Bench(json.loads((FOLDER / "ditpar.json").read_text())["prompts"][: options.prompts])
    grid = {m: [f"pipe=2,patches={m}" + f",warmup={w}" * (w > 1) for w in options.warmup] for m in options.patches}
    patched = [plan for plans in grid.values() for plan in plans]
    rows = bench.in_turn([SINGLE, *dict.fromkeys((*EXACT, *patched, *(plan for plan, _ in SAME)))])
    one = rows[SINGLE]
    steps = {plan: equal_steps(row, one) for plan, row in rows.items()}
    counts = sorted({*FEWER, *(n for plan in patched for n in steps[plan] if n < STEPS)})
    fewer = bench.fewer(counts)
    summaries = [row.summary(one) for row in (*rows.values(), *fewer.values())]
    print("\n" + table(summaries, steps) + "\n", flush=True)

    agreed = {f"{b} to {a}": bench.same(b, rows[a]) for a, b in SAME}
    print("\n".join(f"{pair}: largest distance {value:.1e}" for pair, value in agreed.items()) + "\n", flush=True)

    ends = [grid[min(grid)][0], grid[min(grid)][-1], grid[max(grid)][0]]
    found = drift(bench, rows, list(dict.fromkeys(ends)))
    print(drift_table(found), flush=True)
    if options.out:
        facts = {"rows": summaries, "steps": steps, "agreed": agreed, "drift": found}
        options.out.write_text(json.dumps(facts, indent=1))
    if options.picture:
        at = min(counts, key=lambda n: abs(n - min(steps[ends[0]])))
        sheet(options.picture, bench, rows, fewer[at], [ends[0], ends[-1]])


if __name__ == "__main__":
    main()
