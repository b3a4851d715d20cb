"""Sequence parallel (USP: Ulysses x Ring, arXiv 2405.07719): each rank carries a share of the image and text tokens.

The streams are cut where the first block begins and gathered at the Family's exit. Blocks work on own rows; attention
sites exchange what they need. Text tokens of joint models are shared out like image tokens, so nothing is computed or
counted twice. In a stage pipeline the same seam carries one band of rows at a time through the stage's own blocks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ditpar.attention.local import key_mask
from ditpar.attention.ring import ring_attend
from ditpar.attention.site import Local
from ditpar.attention.stale import gathered, stale_attend
from ditpar.attention.ulysses import ulysses_attend
from ditpar.dataflow.partition import split, start
from ditpar.errors import PlanError
from ditpar.family import Family, Slice
from ditpar.mesh import Mesh
from ditpar.methods.root import Arguments, Root
from ditpar.methods.stages import Stage
from ditpar.stage.program import Span, Unit

METHOD = "sequence"


class Sequence:
    """One transformer's tokens over the ranks of `ring x ulysses`. Also the Strategy of its attention sites.

    Attributes:
        image, text: how many tokens of the forward each rank carries.
        image_span, text_span: which tokens the forward carries, of all.
        stage: this rank's stage of a stage pipeline.
    """

    def __init__(self, family: Family, mesh: Mesh, stage: Stage | None) -> None:
        self.family, self.mesh, self.group, self.stage = family, mesh, mesh.sequence, stage
        self.text: list[int] = []
        self.image: list[int] = []
        self.image_span = self.text_span = Span(0, 0)
        self.image_tokens = self.text_tokens = 0
        self._whole = True  # no block has run yet, so the streams are not cut

    def root(self, root: Root) -> Root:
        """Starts a forward: nothing is cut yet."""

        def wrapped(arguments: Arguments) -> Tensor:
            self.image, self.text, self.text_tokens = [], [0] * self.group.size, 0
            self._whole = True
            if self.family.joint:
                self.text_tokens = arguments["encoder_hidden_states"].shape[1]
                self.text_span = Span(0, self.text_tokens if self.stage is None or self.stage.unit.lead else 0)
                self.text = split(self.text_span.size, self.group.size, last=True)
            out = root(arguments)
            if self._whole:
                raise PlanError(f"{self.family.transformer}: no block ran, so this plan cut nothing")
            return out

        return wrapped

    def block(self, module: nn.Module, index: int, call: Callable[..., Any]) -> Callable[..., Any]:
        """A block's call on own rows. The first block to run in a forward is given whole streams, and cuts them."""
        names = [name for name in inspect.signature(module.forward).parameters if name != "self"]
        extras = [s for s in self.family.slices if s.source == "block"]
        stage = self.stage
        mine = stage is None or stage.begin <= index < stage.end

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            kwargs.update(zip(names, args, strict=False))
            if self._whole:
                self._whole = False
                if not self.image:
                    self._begin(kwargs["hidden_states"].shape[1])
                if stage is None or stage.first:
                    for name, rows in self.family.streams.items():
                        # A copy with strides of its own, so that compiled blocks see what they see from each other.
                        own = self.cut(kwargs[name], 1, rows).clone(memory_format=torch.contiguous_format)
                        kwargs[name] = self._vary(own, 1)
            if stage is not None:
                if index >= stage.begin:
                    stage.enter(kwargs, self.shares, self._vary)
                if index >= stage.end:
                    stage.leave(kwargs, self.shares)
            if not mine:
                return self._passed(kwargs)
            for extra in extras:
                value = kwargs.get(str(extra.item))
                if value is not None:
                    kwargs[str(extra.item)] = self.cut(value, extra.dim, extra.rows)
            return call(**kwargs)

        return wrapped

    def _passed(self, kwargs: dict[str, Any]) -> Any:
        """The streams as a block returns them."""
        by_rows = {rows: kwargs[name] for name, rows in self.family.streams.items()}
        out = tuple(by_rows[rows] for rows in self.family.returns)
        return out if len(out) > 1 else out[0]

    def shares(self, unit: Unit, text: int) -> list[int]:
        """How many rows of each stream this rank carries of a unit whose call has so many text tokens."""
        counts = {
            "image": split(self._image_of(unit).size, self.group.size),
            "text": split(text if unit.lead else 0, self.group.size, last=True),
        }
        return [counts[rows][self.group.index] for rows in self.family.streams.values()]

    def _image_of(self, unit: Unit) -> Span:
        """The unit's image tokens."""
        assert self.stage is not None
        return Span(*(row * self.image_tokens // self.stage.rows for row in unit.rows))

    def prologue(self, slices: list[Slice], call: Callable[..., Any]) -> Callable[..., Any]:
        """The call of a module whose outputs have a row per token (positions, per-token timesteps)."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            out = call(*args, **kwargs)
            items = list(out) if isinstance(out, tuple) else [out]
            for s in slices:
                value = items[int(s.item)]
                if value is not None and (s.ndim is None or value.ndim == s.ndim):
                    if not self.image and s.rows != "text":
                        self._begin(value.shape[s.dim] - (self.text_tokens if s.rows == "joint" else 0))
                    items[int(s.item)] = self.cut(value, s.dim, s.rows)
            return tuple(items) if isinstance(out, tuple) else items[0]

        return wrapped

    def exit(self, module: Any, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call of the exit module: its rows are gathered, so that what follows sees the whole image."""
        stage = self.stage

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if stage is not None and not stage.last:
                stage.left()
                hidden = args[0]
                return hidden.new_zeros(()).expand(hidden.shape[0], self.image_tokens, module.out_features)
            out = self.group.all_gather(METHOD, call(*args, **kwargs), self.image, 1)
            if self.image_span.size == self.image_tokens:
                return out
            whole = out.new_zeros((out.shape[0], self.image_tokens, out.shape[2]))
            whole[:, self.image_span.lo : self.image_span.hi] = out
            return whole

        return wrapped

    def cut(self, value: Tensor, dim: int, rows: str) -> Tensor:
        """Own rows of a tensor that has one per token along `dim`."""
        count = value.shape[dim]
        if rows != "joint":
            sizes, span = (self.image, self.image_span) if rows == "image" else (self.text, self.text_span)
            own = value.narrow(dim, span.lo + start(sizes, self.group.index), sizes[self.group.index])
            return self._vary(own, dim)
        counts = {"text": self.text_tokens, "image": count - self.text_tokens}
        parts = value.split([counts[r] for r in self._order()], dim)
        own = torch.cat([self.cut(p, dim, r) for p, r in zip(parts, self._order(), strict=True)], dim)
        return self._vary(own, dim)

    def _vary(self, own: Tensor, dim: int) -> Tensor:
        """Tells the compiler of blocks that units have different numbers of rows, so that one graph serves all."""
        if self.stage is not None and self.stage.compiled:
            own = own.clone(memory_format=torch.contiguous_format)  # strides would tell of the whole
            torch._dynamo.maybe_mark_dynamic(own, dim)
        return own

    def _order(self) -> tuple[str, str]:
        return ("text", "image") if self.family.joint == "text_first" else ("image", "text")

    def _begin(self, image_tokens: int) -> None:
        self.image_tokens = image_tokens
        self.image_span = Span(0, image_tokens)
        if self.stage is not None:
            self.image_span = self._image_of(self.stage.unit)
        if self.image_span.size < self.group.size:
            raise PlanError(
                f"{self.image_span.size} image tokens cannot be shared by {self.group.size} ring x ulysses ranks"
            )
        self.image = split(self.image_span.size, self.group.size)

    def attend(
        self,
        layer: int,
        rows: str,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        scale: float | None,
        local: Local,
    ) -> Tensor:
        """See attention.site.Strategy."""
        sizes = [i + t for i, t in zip(self.image, self.text, strict=True)] if rows == "joint" else self.image
        if q.shape[1] != sizes[self.group.index] or k.shape != q.shape:
            raise PlanError(
                f"attention site with q {list(q.shape)} and k {list(k.shape)}: expected {sizes[self.group.index]} "
                f"{rows} rows of equal heads on this rank; the {self.family.name} record does not fit this model"
            )
        mask = key_mask(mask, k.shape[1])
        ulysses, ring = self.mesh.ulysses, self.mesh.ring
        inner: Local = local
        if self.stage is not None:
            inner = self._stale(layer, rows, sizes, local)
        elif ring.size > 1:

            def inner(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
                return ring_attend(ring, self._blocks(sizes), q, k, v, mask, scale)

        u = ulysses.size
        if u == 1:
            return inner(q, k, v, mask)
        return ulysses_attend(ulysses, sizes[ring.index * u : (ring.index + 1) * u], q, k, v, mask, inner)

    def _blocks(self, sizes: list[int]) -> list[int]:
        """Rows of each ring rank."""
        u = self.mesh.ulysses.size
        return [sum(sizes[i * u : (i + 1) * u]) for i in range(self.mesh.ring.size)]

    def _stale(self, layer: int, rows: str, sizes: list[int], local: Local) -> Local:
        """Attention to all rows as the stage has them. With a ring every rank needs the keys of all, so they are gathered."""
        assert self.stage is not None
        state, ring = self.stage.slot.kv, self.mesh.ring
        total = self.image_tokens + (self.text_tokens if rows == "joint" else 0)
        places = self._places(rows)

        def inner(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
            if ring.size > 1:
                k, v, mask = gathered(ring, self._blocks(sizes), k, v, mask)
            return stale_attend(state, layer, places, total, q, k, v, mask, local)

        return inner

    def _places(self, rows: str) -> list[tuple[Span, Span]]:
        """Where the rows of all ranks, in the order in which they arrive, are among all rows: text, then image."""
        places, at = [], 0
        for rank in range(self.group.size):
            for kind in self._order() if rows == "joint" else ("image",):
                sizes, span = (self.image, self.image_span) if kind == "image" else (self.text, self.text_span)
                size = sizes[rank]
                to = span.lo + start(sizes, rank) + (self.text_tokens if rows == "joint" and kind == "image" else 0)
                if size:
                    places.append((Span(at, at + size), Span(to, to + size)))
                at += size
        return places
