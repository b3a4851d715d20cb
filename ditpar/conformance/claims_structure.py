"""Claims about blocks: their order, the streams between them, the exit behind them, and that they can be cut apart."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from ditpar.conformance.probe import Hooks, hooks, instead
from ditpar.conformance.report import FalseClaim
from ditpar.conformance.subject import VISIBLE, Call, Subject, distance, submodule


def blocks(subject: Subject) -> str:
    """Every listed block runs once, in the record's order, and no attention runs outside of them."""
    for call in subject.calls:
        expected = subject.blocks(call.transformer)
        ran: list[str] = []
        with hooks() as add:
            for path, block in expected.items():
                add.mark(block, ran, path)
            call.run()
        if ran != list(expected):
            raise FalseClaim(f"blocks ran in the order {_short(ran)}, the record says {_short(list(expected))}")
        inside = {module for block in expected.values() for module in block.modules()}
        stray = [p for p, m in call.transformer.named_modules() if hasattr(m, "processor") and m not in inside]
        if stray:
            raise FalseClaim(f"attention outside of the listed blocks: {', '.join(stray)}")
    return f"{len(expected)} blocks in order"


@dataclass(frozen=True)
class BlockCall:
    """One block's call inside a transformer call."""

    path: str
    block: nn.Module
    arguments: dict[str, Any]
    output: Any

    def run(self, **changes: Any) -> list[Any]:
        """What the block returns, always as a list."""
        return as_list(self.block(**{**self.arguments, **changes}))


def as_list(output: Any) -> list[Any]:
    return list(output) if isinstance(output, tuple | list) else [output]


def block_calls(subject: Subject, call: Call) -> list[BlockCall]:
    """The blocks' arguments and outputs in one transformer call, in order."""
    found: list[BlockCall] = []

    def watch(add: Hooks, path: str, block: nn.Module) -> None:
        arguments: list[dict[str, Any]] = []
        add.before(block, arguments.append)
        add.after(block, lambda output: found.append(BlockCall(path, block, arguments[-1], output)))

    with hooks() as add:
        for path, block in subject.blocks(call.transformer).items():
            watch(add, path, block)
        call.run()
    return found


def streams(subject: Subject) -> str:
    """The named arguments carry [batch, tokens, width] and come back in the record's order; nothing else changes."""
    family = subject.family
    for call in subject.calls:
        found = block_calls(subject, call)
        for at in found:
            parameters = inspect.signature(at.block.forward).parameters
            for name, rows in family.streams.items():
                if name not in parameters:
                    raise FalseClaim(f"{at.path} has no argument {name}; it has {', '.join(parameters)}")
                _expect_rows(f"{at.path} argument {name}", at.arguments[name], call, subject, rows)
            outputs = as_list(at.output)
            if len(outputs) != len(family.returns):
                raise FalseClaim(f"{at.path} returns {len(outputs)} values, the record says {len(family.returns)}")
            for index, (value, rows) in enumerate(zip(outputs, family.returns, strict=True)):
                if value is None and at is found[-1] and rows == "text":
                    continue  # a last block may drop its text
                _expect_rows(f"{at.path} output {index}", value, call, subject, rows)
        for first, second in pairwise(found):
            moving = [
                name
                for name, value in second.arguments.items()
                if isinstance(value, Tensor) and value is not first.arguments.get(name)
            ]
            unlisted = [name for name in moving if name not in family.streams]
            if unlisted:
                raise FalseClaim(f"{second.path} gets new {', '.join(unlisted)}, which the record's streams leave out")
    return ", ".join(f"{name}: {rows}" for name, rows in family.streams.items())


def _expect_rows(what: str, value: Any, call: Call, subject: Subject, rows: str) -> None:
    expected = subject.rows(call, rows)
    if not isinstance(value, Tensor) or value.ndim != 3 or value.shape[:2] != (call.batch, expected):
        shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise FalseClaim(f"{what} is {shape}, the record says {rows} tokens: [{call.batch}, {expected}, width]")


def exit_module(subject: Subject) -> str:
    """The exit runs once, after all blocks, as the last module with weights, and puts out a row per image token."""
    for call in subject.calls:
        transformer = call.transformer
        module = submodule(transformer, subject.family.exit)
        events: list[str] = []
        outputs: list[Any] = []
        with hooks() as add:
            for path, other in transformer.named_modules():
                if other is not module and next(other.parameters(recurse=False), None) is not None:
                    add.mark(other, events, path)
            add.mark(module, events, "exit")
            add.keep(module, outputs)
            call.run()
        if events.count("exit") != 1:
            raise FalseClaim(f"{subject.family.exit} runs {events.count('exit')} times in a call, not once")
        behind = events[events.index("exit") + 1 :]
        if behind:
            raise FalseClaim(
                f"{subject.family.exit} is not the last module: {', '.join(dict.fromkeys(behind))} run later"
            )
        _expect_rows(f"output of {subject.family.exit}", outputs[0], call, subject, "image")
    return f"{subject.family.exit}, {subject.calls[0].image_tokens} image tokens in dim 1"


def stages(subject: Subject) -> str:
    """The model runs in two parts at every cut, and in three: only the streams are handed from part to part."""
    cuts = 0
    for call in subject.calls:
        whole = call.run()
        count = len(subject.blocks(call.transformer))
        plans = [[0, i, count] for i in range(1, count)] + [[0, 1, count - 1, count]] * (count > 2)
        for bounds in plans:
            handed: dict[str, Any] | None = None
            for begin, end in pairwise(bounds):
                output, handed = _run_stage(subject, call, begin, end, handed)
            off = distance(output, whole)
            if off > 0:
                raise FalseClaim(
                    f"cut at blocks {bounds[1:-1]}: the result is off by {off:.1e}; more than streams travels"
                )
            cuts += 1
        if not distance(_run_stage(subject, call, 0, count - 1, None)[0], whole) > VISIBLE:
            raise FalseClaim("leaving out the last block changes nothing, so cuts prove nothing")
    return f"{cuts} cuts, bit-equal"


def _run_stage(
    subject: Subject, call: Call, begin: int, end: int, given: dict[str, Any] | None
) -> tuple[Tensor, dict[str, Any] | None]:
    """The whole forward with only blocks begin..end-1 working; returns its output and the streams for block `end`."""
    all_blocks = list(subject.blocks(call.transformer).values())
    handed: dict[str, Any] = {}

    def take(arguments: dict[str, Any]) -> dict[str, Any] | None:
        return None if given is None else {**arguments, **given}

    def hand(arguments: dict[str, Any]) -> None:
        handed.update({name: arguments[name].clone() for name in subject.family.streams})

    with passing_through(subject, all_blocks[:begin] + all_blocks[end:]), hooks() as add:
        add.before(all_blocks[begin], take)
        if end < len(all_blocks):
            add.before(all_blocks[end], hand)
        output = call.run()
    return output, handed or None


@contextmanager
def passing_through(subject: Subject, modules: Sequence[nn.Module]) -> Iterator[None]:
    """Blocks that return their streams as they came."""
    names = {rows: name for name, rows in subject.family.streams.items()}

    def passer(module: nn.Module) -> Callable[..., Any]:
        signature = inspect.signature(module.forward)

        def forward(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            out = tuple(given[names[rows]] for rows in subject.family.returns)
            return out if len(out) > 1 else out[0]

        # The block's own parameters stay visible: stock code and hooks look at them.
        forward.__signature__ = signature  # type: ignore[attr-defined]
        return forward

    with instead({module: passer(module) for module in modules}):
        yield


def _short(paths: list[str]) -> str:
    return ", ".join(paths[:3] + ["..."] * (len(paths) > 6) + paths[3:][-3:])
