"""Claims that stage pipelines rest on: what embeds latents row by row, and what need not be computed for every band."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import diffusers.models.attention_processor
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ditpar.conformance.probe import hooks
from ditpar.conformance.report import FalseClaim, NoClaim
from ditpar.conformance.subject import TOLERANCE, VISIBLE, Call, Subject, distance, submodule

PARTS = 3


def layers(subject: Subject) -> str:
    """The config keys count the blocks."""
    for call in subject.calls:
        try:
            said = subject.family.layers(call.transformer.config)
        except (KeyError, TypeError, ValueError) as error:
            raise FalseClaim(f"layers_keys {subject.family.layers_keys}: {error!r}") from None
        found = len(subject.blocks(call.transformer))
        if said != found:
            raise FalseClaim(f"{subject.family.layers_keys} add up to {said}, but there are {found} blocks")
    return f"{found} blocks"


def embed(subject: Subject) -> str:
    """The embedding is the one way from the latents into the model, and takes them row by row."""
    dim = subject.family.embed.dim
    for call in subject.calls:
        module = submodule(call.transformer, subject.family.embed.module)
        given: list[Tensor] = []
        made: list[Tensor] = []
        with hooks() as add:
            add.before(module, lambda arguments, given=given: given.append(next(iter(arguments.values()))))  # type: ignore[misc]
            add.keep(module, made)
            whole = call.run()
        if len(made) != 1:
            raise FalseClaim(f"{subject.family.embed.module} runs {len(made)} times in a call, not once")
        x, out = given[0], made[0]
        hidden = call.arguments["hidden_states"]
        if x.shape[dim] != hidden.shape[dim] or whole.shape[dim] not in (hidden.shape[dim], x.shape[dim]):
            raise FalseClaim(
                f"dim {dim} counts {hidden.shape[dim]} rows of the latents, {x.shape[dim]} of what "
                f"{subject.family.embed.module} is given and {whole.shape[dim]} of the output"
            )
        if x.shape[dim] % out.shape[dim]:
            raise FalseClaim(f"{x.shape[dim]} rows become {out.shape[dim]}, which does not divide them")
        each, rows = x.shape[dim] // out.shape[dim], out.shape[dim]
        for part in range(PARTS):
            lo, hi = rows * part // PARTS, rows * (part + 1) // PARTS
            if lo == hi:
                continue
            with torch.no_grad():
                own = module(x.narrow(dim, lo * each, (hi - lo) * each))
            if (off := distance(own, out.narrow(dim, lo, hi - lo))) > TOLERANCE:
                raise FalseClaim(f"rows {lo} to {hi} embedded apart are off by {off:.1e}")
        with hooks() as add:
            add.give(module, out)
            off = distance(call.run(hidden_states=_other(hidden)), whole)
        if off > TOLERANCE:
            raise FalseClaim(f"latents reach the output past {subject.family.embed.module}: it moves by {off:.1e}")
        if (off := distance(call.run(hidden_states=_other(hidden)), whole)) < VISIBLE:
            raise FalseClaim(f"other latents move the output by {off:.1e} only")
    return f"{PARTS} parts; {each} rows of latents make one of tokens"


def once(subject: Subject) -> str:
    """Outputs of `per_step` modules do not depend on the latents, those of `per_request` not on the time either."""
    proved = 0
    for call in subject.calls:
        hidden, time = call.arguments["hidden_states"], call.arguments["timestep"]
        for patterns, changes in (
            (subject.family.per_step, {"hidden_states": _other(hidden)}),
            (subject.family.per_request, {"hidden_states": _other(hidden), "timestep": time * 0.5}),
        ):
            modules = dict(_matched(subject, call, patterns))
            before, after = _outputs(call, modules, {}), _outputs(call, modules, changes)
            for path in modules:
                if len(before[path]) > 1:
                    raise FalseClaim(f"{path} runs {len(before[path])} times in a call, not once")
                for one, other in zip(before[path], after[path], strict=True):
                    if not torch.equal(one, other):
                        raise FalseClaim(f"{path}: its output depends on {', '.join(changes)}")
            proved += len(modules)
    if not proved:
        raise NoClaim("no module is named")
    return f"{proved} modules"


def text(subject: Subject) -> str:
    """Submodules that `text` names are never given image tokens, and functions in `not_empty` exist."""
    family = subject.family
    scopes = [sys.modules[subject.calls[0].transformer.__module__], diffusers.models.attention_processor]
    for name in family.not_empty:
        if not any(hasattr(scope, name) for scope in scopes):
            raise FalseClaim(f"not_empty: there is no function {name} beside the processors")
    if not family.text:
        raise NoClaim("no module is named")
    found: set[str] = set()
    for call in subject.calls:
        image = call.image_tokens
        if image == call.text_tokens:
            raise FalseClaim("as many text as image tokens, which cannot be told apart")
        with hooks() as add:
            for path, block in subject.blocks(call.transformer).items():
                for name in family.text:
                    module = _at(block, name)
                    if module is None:
                        continue
                    found.add(name)

                    def check(arguments: dict[str, Any], where: str = f"{path}.{name}", image: int = image) -> None:
                        tokens = next(iter(arguments.values()))
                        if isinstance(tokens, Tensor) and tokens.ndim == 3 and tokens.shape[1] == image:
                            raise FalseClaim(f"{where} is given image tokens")

                    add.before(module, check)
            call.run()
    if missing := set(family.text) - found:
        raise FalseClaim(f"text: no block has {', '.join(sorted(missing))}")
    return f"{len(found)} modules of a block"


def _other(hidden: Tensor) -> Tensor:
    return torch.randn(hidden.shape, generator=torch.Generator().manual_seed(5)).to(hidden)


def _matched(subject: Subject, call: Call, patterns: tuple[str, ...]) -> Iterator[tuple[str, nn.Module]]:
    """The modules of some patterns. Raises FalseClaim for one that no module could match."""
    names = dict(call.transformer.named_modules())
    for pattern in patterns:
        where, star, _ = pattern.partition(".*.")
        if star and where not in subject.family.blocks:
            raise FalseClaim(f"{pattern}: {where} is no list of blocks")
        if not star and not hasattr(call.transformer, pattern.partition(".")[0]):
            raise FalseClaim(f"{type(call.transformer).__name__} has no module {pattern}")
        regex = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        yield from ((name, module) for name, module in names.items() if regex.fullmatch(name))


def _outputs(call: Call, modules: dict[str, nn.Module], changes: dict[str, Any]) -> dict[str, list[Tensor]]:
    found: dict[str, list[Tensor]] = {path: [] for path in modules}
    with hooks() as add:
        for path, module in modules.items():

            def note(out: Any, path: str = path) -> None:
                found[path].append(torch.cat([_numbers(t) for t in tree_leaves(out) if isinstance(t, Tensor)]))

            add.after(module, note)
        call.run(**changes)
    return found


def _numbers(value: Tensor) -> Tensor:
    return (torch.view_as_real(value) if value.is_complex() else value).double().flatten()


def _at(root: nn.Module, path: str) -> nn.Module | None:
    found: Any = root
    for name in path.split("."):
        found = getattr(found, name, None)
    return found if isinstance(found, nn.Module) else None
