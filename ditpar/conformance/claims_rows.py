"""The claim that matters most: any rows of the sequence can be computed apart, given the others' keys and values."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ditpar.conformance.claims_attention import all_sites
from ditpar.conformance.probe import Attention, Hooks, Tap, hooks
from ditpar.conformance.report import FalseClaim
from ditpar.conformance.subject import TOLERANCE, Call, Subject, distance, submodule
from ditpar.family import Slice

PARTS = 3
Spans = dict[str, slice]
"""Kind of tokens -> the ones of them that a part has."""


def slices(subject: Subject) -> str:
    """Parts with own rows of streams and `slices`, and all keys and values at the sites, make up the whole result.

    Each part runs the stock forward as a rank would: streams are cut at the first block and every tensor of the
    record's slices where it arises; at the sites its rows of keys, values and mask must be the whole ones' rows.
    """
    worst = 0.0
    for call in subject.calls:
        whole = _Whole(subject, call)
        pieces: list[Tensor] = []
        for part in range(PARTS):
            spans = {kind: _span(subject.rows(call, kind), part) for kind in ("image", "text")}
            try:
                pieces.append(_run_part(subject, call, whole, spans))
            except FalseClaim:
                raise
            except Exception as error:  # whatever stock code raises at rows that do not fit is the finding
                raise FalseClaim(
                    f"image tokens {_text(spans['image'])} and text tokens {_text(spans['text'])} cannot be computed "
                    f"apart, the record's slices do not fit: {type(error).__name__}: {error}"
                ) from error
        off = distance(torch.cat(pieces, dim=1), whole.exit)
        worst = max(worst, off)
        if off > TOLERANCE:
            raise FalseClaim(f"{PARTS} parts put together are off by {off:.1e} at the exit {subject.family.exit}")
        with hooks() as add:  # what follows the exit needs nothing but the gathered rows
            _cut_prologue(subject, call, add, spans)
            _cut_blocks(subject, call, add, spans)
            add.give(submodule(call.transformer, subject.family.exit), torch.cat(pieces, dim=1))
            with Tap(add, all_sites(subject, call.transformer), whole.answer(subject, call, spans)):
                off = distance(call.run(), whole.output)
        if off > TOLERANCE:
            raise FalseClaim(f"the rows gathered at {subject.family.exit} make an output that is off by {off:.1e}")
    return f"{PARTS} parts, off by {worst:.0e}; {len(subject.family.slices)} tensors cut beside the streams"


class _Whole:
    """The undivided run: attention calls, output of the exit module, output."""

    def __init__(self, subject: Subject, call: Call) -> None:
        outputs: list[Tensor] = []
        with hooks() as add, Tap(add, all_sites(subject, call.transformer)) as tap:
            add.after(submodule(call.transformer, subject.family.exit), outputs.append)
            self.output = call.run()
        self.attention = tap.calls
        self.exit = outputs[0]

    def answer(self, subject: Subject, call: Call, spans: Spans) -> Any:
        """Attention of a part's queries to the whole keys, after comparing the part's own keys with their rows."""
        waiting = iter(self.attention)

        def answer(own: Attention) -> Tensor:
            full = next(waiting)
            rows = subject.family.sites[own.site.rpartition(".")[2]]
            index = _index(subject, call, rows, spans)
            for name in ("q", "k", "v"):
                off = distance(getattr(own, name), getattr(full, name)[:, :, index])
                if off > TOLERANCE:
                    raise FalseClaim(
                        f"{own.site}: {name} of image tokens {_text(spans['image'])} and text tokens "
                        f"{_text(spans['text'])} is off by {off:.1e}; the record's slices do not fit"
                    )
            mask = full.mask
            if mask is not None:
                if own.mask is None or not torch.equal(own.mask, mask[..., index]):
                    raise FalseClaim(f"{own.site}: the mask of a part is not the part of the mask")
                if mask.ndim > 2 and mask.shape[-2] > 1:
                    mask = mask[..., index, :]
            return F.scaled_dot_product_attention(own.q, full.k, full.v, attn_mask=mask)

        return answer


def _run_part(subject: Subject, call: Call, whole: _Whole, spans: Spans) -> Tensor:
    """The exit module's output for the part's rows."""
    outputs: list[Tensor] = []

    def leave(output: Tensor) -> Tensor:
        outputs.append(output)
        return whole.exit  # the rest of the forward expects all rows

    with hooks() as add:
        _cut_prologue(subject, call, add, spans)
        _cut_blocks(subject, call, add, spans)
        add.after(submodule(call.transformer, subject.family.exit), leave)
        with Tap(add, all_sites(subject, call.transformer), whole.answer(subject, call, spans)):
            call.run()
    return outputs[0]


def _cut_prologue(subject: Subject, call: Call, add: Hooks, spans: Spans) -> None:
    for item in subject.family.slices:
        if item.source == "block":
            continue

        def cut(output: Any, item: Slice = item) -> Any:
            values = list(output) if isinstance(output, tuple) else [output]
            value = values[int(item.item)]
            if value is not None and (item.ndim is None or value.ndim == item.ndim):
                values[int(item.item)] = _take(subject, call, value, item.dim, item.rows, spans)
            return tuple(values) if isinstance(output, tuple) else values[0]

        add.after(submodule(call.transformer, item.source), cut)


def _cut_blocks(subject: Subject, call: Call, add: Hooks, spans: Spans) -> None:
    family = subject.family
    for number, block in enumerate(subject.blocks(call.transformer).values()):

        def cut(arguments: dict[str, Any], first: bool = number == 0) -> dict[str, Any]:
            for name, rows in family.streams.items() if first else ():
                arguments[name] = _take(subject, call, arguments[name], 1, rows, spans)
            for item in family.slices:
                if item.source == "block" and arguments.get(str(item.item)) is not None:
                    name = str(item.item)
                    arguments[name] = _take(subject, call, arguments[name], item.dim, item.rows, spans)
            return arguments

        add.before(block, cut)


def _take(subject: Subject, call: Call, value: Tensor, dim: int, rows: str, spans: Spans) -> Tensor:
    if value.shape[dim] != subject.rows(call, rows):
        raise FalseClaim(
            f"a sliced tensor has shape {list(value.shape)}; the record says that dim {dim} counts the {rows} tokens, "
            f"{subject.rows(call, rows)} of them"
        )
    return value.index_select(dim, _index(subject, call, rows, spans))


def _index(subject: Subject, call: Call, rows: str, spans: Spans) -> Tensor:
    """A part's rows in a sequence of the given tokens."""
    image, text = torch.arange(call.image_tokens), torch.arange(call.text_tokens)
    if rows == "image":
        return image[spans["image"]]
    if rows == "text":
        return text[spans["text"]]
    if subject.family.joint == "image_first":
        return torch.cat([image[spans["image"]], call.image_tokens + text[spans["text"]]])
    return torch.cat([text[spans["text"]], call.text_tokens + image[spans["image"]]])


def _span(count: int, part: int) -> slice:
    return slice(count * part // PARTS, count * (part + 1) // PARTS)


def _text(span: slice) -> str:
    return f"{span.start}-{span.stop - 1}"
