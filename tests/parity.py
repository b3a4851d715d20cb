"""One parity case as every rank runs it: a plan against the stock pipeline on the same inputs, and its sabotage."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

import ditpar
from ditpar.conformance.variants import variants
from ditpar.family import families


@dataclass(frozen=True)
class Case:
    """A plan on one variant of a family. `options` are call options of the variant's inputs."""

    family: str
    variant: str
    plan: str
    options: tuple[tuple[str, object], ...] = ()

    def __str__(self) -> str:
        return f"{self.family}-{self.variant}-{self.plan}".replace(" ", "_")


def _variant(case: Case):
    return next(v for v in variants(families()[case.family]) if v.name == case.variant)


@cache
def _pipe(family: str, variant: str, dtype: torch.dtype):
    return _variant(Case(family, variant, "")).build(families()[family], dtype=dtype)


def _run(case: Case, dtype: torch.dtype, plan: str | None = None, sabotage: str | None = None) -> Tensor:
    pipe = _pipe(case.family, case.variant, dtype)
    call = _variant(case).inputs(families()[case.family], pipe, **dict(case.options))
    if plan is None:
        return pipe(**call)[0]
    ditpar.parallelize(pipe, plan)
    try:
        if sabotage:
            _sabotage(pipe._ditpar, sabotage)
        return pipe(**call)[0]
    finally:
        ditpar.restore(pipe)


@cache
def _stock(case: Case, dtype: torch.dtype) -> Tensor:
    return _run(case, dtype)


def distance(got: Tensor, want: Tensor) -> float:
    """Relative L2, computed in fp64."""
    got, want = got.double(), want.double()
    return float((got - want).norm() / want.norm())


def parity(case: Case) -> dict[str, float]:
    """Distance to stock in fp32, whether restoring gave stock's bits back, and the bf16 errors of both."""
    stock = Case(case.family, case.variant, "", case.options)
    want = _stock(stock, torch.float32)
    result = {"fp32": distance(_run(case, torch.float32, case.plan), want)}
    result["restored"] = float(torch.equal(_run(stock, torch.float32), want))
    result["stock bf16"] = distance(_stock(stock, torch.bfloat16), want)
    result["bf16"] = distance(_run(case, torch.bfloat16, case.plan), want)
    return result


def sabotaged(case: Case, kind: str) -> float:
    """How far the result moves when the plan's method is made wrong on purpose."""
    want = _stock(Case(case.family, case.variant, "", case.options), torch.float32)
    return distance(_run(case, torch.float32, case.plan, kind), want)


def possible_sabotages(case: Case) -> list[str]:
    """The sabotages that would be wrong for this case, so that a sound test must notice them."""
    family, plan = families()[case.family], ditpar.Plan.parse(case.plan)
    kinds = []
    if plan.sequence > 1:
        kinds.append("rows swapped")
        if family.joint and plan.pipe == 1:  # stages notice it themselves: a message has another size than expected
            kinds.append("text doubled")
            if dict(_variant(case).call, **dict(case.options)).get("masked"):
                kinds.append("mask dropped")
    if plan.cfg > 1:
        kinds.append("branch shifted")
    if plan.data > 1:
        kinds.append("samples shifted")
    if plan.pipe > 1:
        kinds.append("stages shifted")
    return kinds


def _sabotage(engine, kind: str) -> None:
    for binding in engine.bindings.values():
        if kind in ("branch shifted", "samples shifted"):
            for group in (engine.mesh.cfg, engine.mesh.data, engine.mesh.batch):
                exchange = group.exchange

                def by_one_row(method, send, recv, exchange=exchange):
                    exchange(method, [t.roll(1, dims=-2) for t in send], recv)

                group.exchange = by_one_row
            continue
        if kind == "stages shifted":
            after = binding.stage.after
            if after is not None:
                send = after.send
                after.send = lambda *tensors, send=send: send(*(t.roll(1, dims=1) for t in tensors))
            continue
        sequence = binding.sequence
        if kind == "rows swapped":
            if "all_gather" in vars(sequence.group):
                continue  # two transformers share one group, and two swaps would be none
            gather = sequence.group.all_gather

            def wrong_order(method, mine, sizes, dim, gather=gather):
                return gather(method, mine, sizes, dim).flip(dim)

            sequence.group.all_gather = wrong_order
        elif kind == "text doubled":
            cut, root = sequence.cut, sequence.root

            def whole_text(value, dim, rows, cut=cut):
                return value if rows == "text" else cut(value, dim, rows)

            def every_rank_all_text(inner, root=root, sequence=sequence):
                def with_text(arguments):
                    sequence.text = [sequence.text_tokens] * sequence.group.size
                    return inner(arguments)

                return root(with_text)

            sequence.cut, sequence.root = whole_text, every_rank_all_text
        elif kind == "mask dropped":
            attend = sequence.attend

            def unmasked(layer, rows, q, k, v, mask, scale, local, attend=attend):
                return attend(layer, rows, q, k, v, None, scale, local)

            sequence.attend = unmasked
        else:
            raise ValueError(kind)
