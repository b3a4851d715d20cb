"""Requests under plans with stages, for the tests of PipeFusion."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from naive import Naive, measured
from parity import distance

import ditpar
from ditpar.conformance.variants import variants
from ditpar.dataflow.deferred import resolve
from ditpar.engine.undo import Changes
from ditpar.family import families
from ditpar.stage.program import Kind


def _built(name: str, variant: str, options: dict[str, Any]) -> tuple[Any, Any, Any]:
    """The family, a new pipeline of the variant, and its call."""
    family = families()[name]
    kind = next(v for v in variants(family) if v.name == variant)
    kind = replace(kind, config={**kind.config, **options.pop("build", {})})
    pipe = kind.build(family)
    return family, pipe, kind.inputs(family, pipe, **options)


def pair(name: str, plan: str, variant: str = "plain", **options: Any) -> tuple[float, int, int, dict[Any, int]]:
    """The same call stock and under a plan: their distance, calls as a whole and in bands, operations that forced."""
    _, pipe, call = _built(name, variant, options)
    generator = call.get("generator")
    state = generator.get_state() if isinstance(generator, torch.Generator) else None
    want = pipe(**call)[0]
    ditpar.parallelize(pipe, plan)
    if state is not None:
        generator.set_state(state)
    got = pipe(**call)[0]
    calls = pipe._ditpar.calls
    return distance(got, want), calls.synchronous, calls.patched, dict(pipe._ditpar.forced)


def patched_at_the_same_point(name: str, plan: str, variant: str = "plain", **options: Any) -> list[float]:
    """Each branch's call as a warm-up, then in bands at the same latents and time: distances to the stock result."""
    _, pipe, request = _built(name, variant, {"steps": 2, **options})
    taken: list[dict[str, Any]] = []
    outputs: list[torch.Tensor] = []
    names = list(inspect.signature(type(pipe.transformer).forward).parameters)[1:]

    def take(_: Any, args: Any, kwargs: Any, out: Any) -> None:
        taken.append({**dict(zip(names, args, strict=False)), **kwargs})
        outputs.append(out[0].clone())

    hook = pipe.transformer.register_forward_hook(take, with_kwargs=True)
    pipe(**request)
    hook.remove()
    taken = [call for call in taken if call["hidden_states"] is taken[0]["hidden_states"]]  # those of the first step
    ditpar.parallelize(pipe, plan)
    engine, distances = pipe._ditpar, []
    with changed(pipe), torch.no_grad():
        for hidden in (taken[0]["hidden_states"], taken[0]["hidden_states"].clone()):
            results = [pipe.transformer(**{**call, "hidden_states": hidden})[0] for call in taken]
            distances += [distance(resolve(r), want) for r, want in zip(results, outputs, strict=False)]
        assert engine.calls.synchronous == engine.calls.patched == len(taken)
    return distances


@contextmanager
def changed(pipe: Any) -> Iterator[None]:
    """The time of a request, without the stock pipeline's call."""
    changes = Changes()
    try:
        with pipe._ditpar.calls.request():
            pipe._ditpar._apply(changes, pipe)
            yield
    finally:
        changes.undo()


def against_naive(name: str, plan: str, variant: str = "plain", **options: Any) -> tuple[float, float, int]:
    """A real run against the one worked out by hand: distance of the results, worst distance of the states after a
    micro-step, and the number of micro-steps compared."""
    family, pipe, call = _built(name, variant, dict(options))
    _, other, _ = _built(name, variant, dict(options))
    ditpar.parallelize(pipe, plan)
    engine = pipe._ditpar
    units, states = [], []
    run_unit = engine.calls._run_unit
    layers = {}

    def noting(call: Any, other: Any, unit: Any) -> None:
        run_unit(call, other, unit)
        units.append(unit)
        binding = engine.bindings["transformer"]
        layers.update({path: twin._parallel_config.layer for path, (_, twin) in binding._twins.items()})
        known = call.slot.kv._layers
        states.append({path: measured(*known[n][:2]) for path, n in layers.items() if n in known})

    engine.calls._run_unit = noting
    state = call["generator"].get_state()
    got = pipe(**call)[0]
    bands = next(([u.rows for u in units if u.run == first.run] for first in units if first.kind is Kind.PATCH), [])
    naive = Naive(family, bands, engine.plan.warmup)
    call["generator"].set_state(state)
    with naive.on(other.transformer):
        want = other(**call)[0]
    assert len(naive.states) == len(states) and len(states[0]) > 0
    worst = 0.0
    for mine, theirs in zip(states, naive.states, strict=True):
        for path, values in mine.items():
            worst = max(worst, *(abs(a - b) / abs(b) for a, b in zip(values, theirs[path], strict=True)))
    return distance(got, want), worst, len(states)


class Ticks:
    """In the place of a progress bar, whose steps it tells."""

    def __init__(self, tick: Any) -> None:
        self.tick = tick

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def update(self, n: int = 1) -> None:
        self.tick()
