"""Claims about attention: where image rows mix, in which order the tokens stand, and by which processors."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import diffusers.models.attention_processor as shared_processors
import torch
from torch import Tensor, nn

from ditpar.conformance.claims_structure import BlockCall, as_list, block_calls, passing_through
from ditpar.conformance.probe import Attention, Hooks, Tap, hooks
from ditpar.conformance.report import FalseClaim, NoClaim
from ditpar.conformance.subject import TOLERANCE, VISIBLE, Call, Subject, distance
from ditpar.conformance.variants import variants

PROBED = 3
"""The token that is changed to see where it goes."""


def sites(subject: Subject) -> str:
    """Image rows mix at the listed sites, at every one of them, and nowhere else in a block."""
    names: dict[str, None] = {}
    for call in subject.calls:
        for at in block_calls(subject, call):
            modules = subject.sites(at.block)
            if not modules:
                raise FalseClaim(f"{at.path} has none of the sites {', '.join(subject.family.sites)}")
            names.update(dict.fromkeys(modules))
            seen, outputs = _observe(at, modules)
            for name in modules:
                _expect_sequence(subject, call, at, name, [a for a in seen if a.site == name])
            changes = _nudged(subject, at, "image")
            with hooks() as add:
                _freeze(add, modules, outputs)
                frozen = _moved_rows(subject, call, at, at.run(**changes), "image")
            if frozen - {("image", PROBED)}:
                other = [n for n, m in at.block.named_modules() if hasattr(m, "processor") and n not in modules]
                raise FalseClaim(
                    f"{at.path}: image rows also mix outside of {', '.join(modules)}"
                    + (f"; the record leaves out attention {', '.join(other)}" if other else "")
                )
            for name in modules:
                with hooks() as add:
                    _freeze(add, {n: m for n, m in modules.items() if n != name}, outputs)
                    moved = _moved_rows(subject, call, at, at.run(**changes), "image")
                if not {row for row in moved if row[0] == "image"} - {("image", PROBED)}:
                    raise FalseClaim(f"{at.path}.{name} does not mix image rows")
    return ", ".join(f"{name}: {subject.family.sites[name]}" for name in names)


def joint(subject: Subject) -> str:
    """Token i of a stream is row i of its part of the sequence at every site, text and image in the record's order."""
    family = subject.family
    if family.joint is None and (wrong := [n for n, r in {**family.sites, **family.streams}.items() if r != "image"]):
        raise FalseClaim(f"the record has no joint sequence, yet {', '.join(wrong)} hold text")
    if family.joint and "joint" not in family.sites.values():
        raise FalseClaim(f"the record says {family.joint}, yet no site has a joint sequence")
    for call in subject.calls:
        first = {"text": 0, "image": 0}
        if family.joint:
            first = {"text": 0, "image": call.text_tokens}
            if family.joint == "image_first":
                first = {"text": call.image_tokens, "image": 0}
        for at in block_calls(subject, call):
            modules = subject.sites(at.block)
            before, outputs = _observe(at, modules)
            for kind in family.streams.values():
                after, _ = _observe(at, modules, _nudged(subject, at, kind), outputs)
                for old, new in zip(before, after, strict=True):
                    moved = _rows_of((old.q - new.q).abs().amax((0, 1, 3)))
                    in_image_alone = family.sites[old.site] == "image"
                    start = 0 if in_image_alone else first[kind]
                    expected = set() if in_image_alone and kind == "text" else {start + PROBED}
                    if moved != expected:
                        raise FalseClaim(
                            f"{at.path}.{old.site}: {kind} token {PROBED} stands in row {sorted(moved)}, "
                            f"the record says {sorted(expected)} ({family.joint or 'no joint sequence'})"
                        )
    if family.joint is None:
        raise NoClaim("text is no part of the sequence")
    return family.joint


def processors(subject: Subject) -> str:
    """Each named processor makes one attention call at a site, with the stock result; the model's own are named."""
    family = subject.family
    proved: set[str] = set()
    broken: set[str] = set()
    for call in subject.calls:
        want = call.run()
        for candidate in _with_processors(subject, call):
            places = all_sites(subject, candidate.transformer)
            kinds = {type(module.processor).__name__ for module in places.values()}
            if candidate is call and not kinds <= set(family.processors):
                raise FalseClaim(f"the model has {', '.join(sorted(kinds))} at its sites, the record names other ones")
            try:
                with hooks() as add, Tap(add, places) as tap:
                    off = distance(candidate.run(), want)
            except Exception:
                if candidate is call:
                    raise
                broken |= kinds  # stock code cannot run this processor in this variant (fused SD3.5)
                continue
            calls = [attention.site for attention in tap.calls]
            if kinds <= set(family.processors):
                if calls != tap.entered:
                    raise FalseClaim(
                        f"{', '.join(kinds)} made {len(calls)} attention calls in {len(tap.entered)} sites"
                    )
                if off > TOLERANCE * 10:
                    raise FalseClaim(f"with {', '.join(kinds)} the result is off by {off:.1e}")
                proved |= kinds
    if subject.variant == variants(family)[0]:
        broken = set()  # here at least each has to run
    if unproved := [name for name in family.processors if name not in proved | broken]:
        raise FalseClaim(f"no way was found to give the model processor {', '.join(unproved)}")
    unfit = broken - proved
    return ", ".join(sorted(proved)) + (f"; diffusers cannot run {', '.join(unfit)} here" if unfit else "")


def _with_processors(subject: Subject, call: Call) -> list[Call]:
    """The call on the stock model, on copies with fused projections, and with each other named processor."""
    found = [call]

    def another() -> Any:
        found.append(Call(call.name, copy.deepcopy(call.transformer), call.arguments))
        return found[-1].transformer

    if hasattr(call.transformer, "fuse_qkv_projections"):
        another().fuse_qkv_projections()
    for name in subject.family.processors:
        if not name.startswith("Fused") and (kind := getattr(shared_processors, name, None)) is not None:
            another().set_attn_processor(kind())
    return found


def heads(subject: Subject) -> str:
    """`heads_key` names the number of heads that attention has at the sites."""
    key = subject.family.heads_key
    for call in subject.calls:
        if key not in call.transformer.config:
            raise FalseClaim(f"the config has no {key}")
        claimed = subject.family.heads(call.transformer.config)
        with hooks() as add, Tap(add, all_sites(subject, call.transformer)) as tap:
            call.run()
        found = {tensor.shape[1] for attention in tap.calls for tensor in (attention.q, attention.k, attention.v)}
        if found != {claimed}:
            raise FalseClaim(f"config {key} is {claimed}, but attention has {sorted(found)} heads")
    return f"{key}: {claimed}"


def paths(subject: Subject) -> str:
    """Every block, site and text token of the tiny model matters, so that an error in any of them would show."""
    least = float("inf")
    for call in subject.calls:
        want = call.run()
        effects: dict[str, float] = {}
        for path, block in subject.blocks(call.transformer).items():
            with passing_through(subject, [block]):
                effects[path] = distance(call.run(), want)
            for name, module in subject.sites(block).items():
                with hooks() as add:
                    add.after(module, _zeros)
                    effects[f"{path}.{name}"] = distance(call.run(), want)
        text = call.arguments["encoder_hidden_states"].clone()
        text[:, 0] += 1
        effects["the first text token"] = distance(call.run(encoder_hidden_states=text), want)
        weakest = min(effects, key=effects.__getitem__)
        least = min(least, effects[weakest])
        if not least > VISIBLE:
            raise FalseClaim(
                f"without {weakest} the result changes by {effects[weakest]:.1e} only: errors there would hide"
            )
    return f"the least changes the result by {least:.0e}"


def _zeros(output: Any) -> Any:
    if isinstance(output, tuple):
        return tuple(torch.zeros_like(x) for x in output)
    return torch.zeros_like(output)


def all_sites(subject: Subject, transformer: nn.Module) -> dict[str, Any]:
    return {
        f"{path}.{name}": module
        for path, block in subject.blocks(transformer).items()
        for name, module in subject.sites(block).items()
    }


def _observe(
    at: BlockCall,
    modules: dict[str, nn.Module],
    changes: dict[str, Any] | None = None,
    frozen: dict[str, Any] | None = None,
) -> tuple[list[Attention], dict[str, Any]]:
    """The attention calls at a block's sites, and the sites' outputs; with site outputs `frozen` if given."""
    outputs: dict[str, list[Any]] = {name: [] for name in modules}
    with torch.no_grad(), hooks() as add, Tap(add, modules) as tap:
        if frozen:
            _freeze(add, modules, frozen)
        for name, module in modules.items():
            add.keep(module, outputs[name])
        at.run(**(changes or {}))
    return tap.calls, {name: kept[-1] for name, kept in outputs.items()}


def _freeze(add: Hooks, modules: dict[str, nn.Module], outputs: dict[str, Any]) -> None:
    for name, module in modules.items():
        add.give(module, outputs[name])


def _nudged(subject: Subject, at: BlockCall, kind: str) -> dict[str, Tensor]:
    """The block's stream of a kind with one token changed."""
    changes: dict[str, Tensor] = {}
    for name, rows in subject.family.streams.items():
        if rows == kind:
            value = at.arguments[name].clone()
            value[:, PROBED] += torch.linspace(-1, 1, value.shape[-1])
            changes[name] = value
    return changes


def _moved_rows(subject: Subject, call: Call, at: BlockCall, outputs: list[Any], kind: str) -> set[tuple[str, int]]:
    """(kind, token) of every row of the block's outputs that is not as before."""
    moved: set[tuple[str, int]] = set()
    for rows, new, old in zip(subject.family.returns, outputs, as_list(at.output), strict=True):
        if new is not None:
            moved |= {(rows, row) for row in _rows_of((new - old).abs().amax((0, 2)))}
    return moved


def _rows_of(changes: Tensor) -> set[int]:
    return set(torch.nonzero(changes > 1e-6).flatten().tolist())


def _expect_sequence(subject: Subject, call: Call, at: BlockCall, name: str, seen: Sequence[Attention]) -> None:
    rows = subject.family.sites[name]
    if not seen:
        raise FalseClaim(f"{at.path}.{name} makes no attention call")
    for attention in seen:
        queries, keys = attention.q.shape[2], attention.k.shape[2]
        if queries != keys:
            raise FalseClaim(f"{at.path}.{name} is cross-attention: {queries} queries, {keys} keys")
        if queries != (claimed := subject.rows(call, rows)):
            raise FalseClaim(f"{at.path}.{name} has a sequence of {queries} tokens; the record says {rows}: {claimed}")
