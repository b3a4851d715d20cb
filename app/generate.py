"""`ditpar generate`: options to a Request and a Plan, images to files."""

from __future__ import annotations

import inspect
import json
import re
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import diffusers
import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import ditpar
from ditpar.app.png import Record, read_png, write_png
from ditpar.errors import PlanError, RequestError
from ditpar.gang.load import pipeline_class
from ditpar.gang.modelfolder import DEFAULT_MODEL, Model, read_model
from ditpar.plan import Plan, auto
from ditpar.request import NAMES, Request
from ditpar.trace import Event, chrome

OPTION = {
    "guidance_scale": "--guidance",
    "true_cfg_scale": "--true-cfg",
    "negative_prompt": "--negative",
    "height": "--size",
}
OPTION |= {"width": "--size", "num_inference_steps": "--steps"}
TOKEN_SIDE = 16
"""Pixels a side of an image token: 8 times down in the VAE, then 2 x 2 latents. Pipelines differ in what they do with
other sizes: some draw a smaller picture, some raise in the midst of the work."""


@dataclass(frozen=True)
class Options:
    """The command's options as typed."""

    prompt: str | None
    model: str | None
    plan: str | None
    ranks: int | None
    size: str | None
    steps: int | None
    guidance: float | None
    true_cfg: float | None
    settings: list[str]
    seed: int | None
    count: int
    negative: str | None
    out: Path | None
    source: Path | None
    trace: Path | None = None


def run(options: Options, as_json: bool) -> None:
    """Checks everything that can be checked first, then loads, generates and saves image by image."""
    source = read_png(options.source) if options.source else None
    model = read_model(options.model or (source.model if source else DEFAULT_MODEL))
    parameters = inspect.signature(pipeline_class(model).__call__).parameters
    request = _request(options, source, model, set(parameters))
    plan = _plan(
        options, source, model, request, {n: p.default for n, p in parameters.items() if p.default is not p.empty}
    )
    calls = _calls(options, request, plan, source)
    _check_out(options.out)
    if options.trace is not None and (options.trace.is_dir() or not options.trace.absolute().parent.is_dir()):
        raise RequestError(f"--trace {options.trace}: must be a file in a folder that exists")
    many = sum(len(indices) for _, indices in calls) > 1
    console = Console(stderr=True)
    begun = time.monotonic()
    with console.status(f"loading {Path(model.name).name} on {plan.world} rank{'s' * (plan.world > 1)} ({plan})"):
        pipe = ditpar.load(model.path, plan=plan, quiet=True, trace=options.trace is not None)
    with pipe:
        pipe.set_progress_bar_config(disable=True)
        loaded = time.monotonic() - begun
        results = []
        events: list[list[Event]] = [[] for _ in range(plan.world)]
        for call, indices in calls:
            images, times = _generate(pipe, call, console)
            for mine, more in zip(events, pipe.events, strict=False):
                mine += more
            for index in indices:
                record = Record(call, plan, model.name, index, _versions())
                path = _path(options.out, record, many)
                write_png(images[index], path, record)
                result = {"path": str(path), "seed": record.seed, "seconds": round(sum(times), 3)}
                results.append({**result, "step_seconds": round(_median(times), 4)})
                if not as_json:
                    print(path, flush=True)
        memory = pipe.memory()
    if options.trace is not None:
        options.trace.write_text(json.dumps(chrome(events)))
    if as_json:
        summary = {"images": results, "plan": str(plan), "model": model.name, "load_seconds": round(loaded, 2)}
        print(json.dumps({**summary, "ranks": memory}))


def _request(options: Options, source: Record | None, model: Model, known: set[str]) -> Request:
    """The request with the model's defaults filled in. Raises for arguments that the pipeline does not take."""
    given: dict[str, Any] = {}
    if source:
        given = {f.name: getattr(source.request, f.name) for f in fields(Request)}
        if source.request.count == 1 or _changed(options):
            given.update(seed=source.seed, count=1)
    typed = {
        "prompt": options.prompt,
        "negative": options.negative,
        "steps": options.steps,
        "guidance": options.guidance,
    }
    typed |= {"true_cfg": options.true_cfg, "seed": options.seed}
    if options.size:
        match = re.fullmatch(r"(\d+)[xX](\d+)", options.size)
        if not match:
            raise typer.BadParameter(
                f"{options.size!r} is not of the form WxH, for example 256x256", param_hint="--size"
            )
        typed |= {"width": int(match[1]), "height": int(match[2])}
    if not source or options.count != 1:
        typed["count"] = options.count
    given.update({name: value for name, value in typed.items() if value is not None})
    if "prompt" not in given:
        raise typer.BadParameter("a prompt is needed (or --from FILE.png)", param_hint="PROMPT")
    given["extra"] = {**given.get("extra", {}), **_settings(options.settings)}
    for name in given["extra"]:
        if name not in known and name not in NAMES.values():
            raise RequestError(
                f"--set {name}: {model.pipeline} takes {', '.join(sorted(known - {'self', 'generator'}))}"
            )
    request = Request(**given)
    for name in request.call():
        if name not in known:
            raise RequestError(f"{OPTION.get(name, name)}: {model.pipeline} takes no {name}")
    for name, side in (("width", request.width), ("height", request.height)):
        if side is not None and side % TOKEN_SIDE:
            raise RequestError(f"--size: {name}={side} must be a multiple of {TOKEN_SIDE} for {model.pipeline}")
    if "num_frames" in known:
        raise RequestError(
            f"model: {model.pipeline} makes videos, which this command does not write yet; use ditpar.load"
        )
    return _filled(request, {k: v for k, v in model.defaults.items() if k in known})


def _changed(options: Options) -> bool:
    return any((options.prompt, options.seed is not None, options.count != 1, options.plan, options.ranks))


def _filled(request: Request, defaults: dict[str, Any]) -> Request:
    """The request with every default written out, so that its record says all."""
    call = request.call(defaults)
    named = {f: call[name] for f, name in NAMES.items() if name in call}
    extra = {k: v for k, v in call.items() if k not in (*NAMES.values(), "num_images_per_prompt")}
    return replace(request, **named, extra=extra)


def _settings(items: list[str]) -> dict[str, Any]:
    settings = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise typer.BadParameter(f"{item!r} is not of the form KEY=VALUE", param_hint="--set")
        try:
            settings[key.strip()] = json.loads(value)
        except ValueError:
            settings[key.strip()] = value
    return settings


def _plan(options: Options, source: Record | None, model: Model, request: Request, defaults: dict[str, Any]) -> Plan:
    """The plan for one call of this request; --plan and --ranks imply each other and must agree."""
    if options.ranks is not None and options.ranks < 1:
        raise PlanError(f"--ranks {options.ranks} must be at least 1")
    typed = options.plan if options.plan != "auto" else None
    call = {**defaults, **request.call()}
    if typed is None and options.ranks is None and options.plan is None and source:
        plan = source.plan
    elif typed is not None:
        plan = Plan.parse(typed)
    else:
        plan = auto(model.family, model.config, call, options.ranks or max(torch.cuda.device_count(), 1))
    if plan.data > 1:
        if "num_images_per_prompt" not in defaults:
            raise PlanError(f"plan: {plan}: {model.pipeline} takes no num_images_per_prompt; use cfg or ulysses")
        call["num_images_per_prompt"] = min(request.count, plan.data)
    plan.validate(model.family, model.config, call, options.ranks)
    return plan


def _calls(options: Options, request: Request, plan: Plan, source: Record | None) -> list[tuple[Request, list[int]]]:
    """Engine calls, and which of their images are wanted. One image a call, unless the plan shares out a batch."""
    if source and not _changed(options) and request.count > 1:
        return [(request, [source.index])]
    if plan.data == 1:
        return [(request.single(i), [0]) for i in range(request.count)]
    if request.count % plan.data:
        raise PlanError(
            f"plan: {plan} makes {plan.data} images a call, so --count must be a multiple of that, not {request.count}"
        )
    starts = range(0, request.count, plan.data)
    return [(replace(request, seed=request.seed + i, count=plan.data), list(range(plan.data))) for i in starts]


class _Bar:
    """The steps of one call, drawn and timed. Takes the place of the pipeline's own bar, and needs no callback."""

    def __init__(self, progress: Progress, seed: int, total: int) -> None:
        self.progress, self.n = progress, 0
        self.task = progress.add_task("", total=total, seed=seed, speed="")
        self.times: list[float] = []
        self.last = time.monotonic()

    def update(self, n: int) -> None:
        now = time.monotonic()
        self.n += n
        self.times += [(now - self.last) / n] * n
        self.last = now
        self.progress.update(self.task, advance=n, speed=f"{self.times[-1]:.3f} s/step")

    def close(self) -> None:
        self.progress.update(self.task, refresh=True)


def _generate(pipe: Any, call: Request, console: Console) -> tuple[list[Any], list[float]]:
    """One engine call. Returns its images and the seconds of each step."""
    generators = [torch.Generator().manual_seed(seed) for seed in call.seeds]
    columns = (TextColumn("seed {task.fields[seed]}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bars: list[_Bar] = []
    begun = time.monotonic()
    with Progress(*columns, TextColumn("{task.fields[speed]}"), console=console) as progress:

        def bar(total: int) -> _Bar:
            bars.append(_Bar(progress, call.seed, total))
            return bars[-1]

        vars(pipe)["progress_bar"] = bar
        output = pipe(**call.call(), generator=generators if call.count > 1 else generators[0])
    times = [t for each in bars for t in each.times]
    return output.images, times or [time.monotonic() - begun]


def _check_out(out: Path | None) -> None:
    if out is not None and out.suffix and out.suffix.lower() != ".png" and not out.is_dir():
        raise RequestError(f"--out {out}: images are written as .png")


def _path(out: Path | None, record: Record, many: bool) -> Path:
    """Where an image goes: the named file (numbered by seed if there are many), or a new name in the folder."""
    if out is not None and out.suffix.lower() == ".png":
        return out.with_stem(f"{out.stem}-{record.seed}") if many else out
    slug = re.sub(r"[^a-z0-9]+", "-", record.request.prompt.lower()).strip("-")[:40] or "image"
    folder = out or Path()
    path, n = folder / f"{slug}-{record.seed}.png", 1
    while path.exists():
        path, n = folder / f"{slug}-{record.seed}-{n}.png", n + 1
    return path


def _versions() -> dict[str, str]:
    return {"ditpar": ditpar.__version__, "torch": torch.__version__, "diffusers": diffusers.__version__}


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
