"""Sequence parallel (USP: Ulysses x Ring, arXiv 2405.07719): each rank carries a share of the image and text tokens.

The streams are cut where the first block begins and gathered at the Family's exit. Blocks work on own rows; attention
sites exchange what they need. Text tokens of joint models are shared out like image tokens, so nothing is computed or
counted twice.
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
from ditpar.attention.ulysses import ulysses_attend
from ditpar.dataflow.partition import split, start
from ditpar.errors import PlanError
from ditpar.family import Family, Slice
from ditpar.mesh import Mesh
from ditpar.methods.root import Arguments, Root

METHOD = "sequence"


class Sequence:
    """One transformer's tokens over the ranks of `ring x ulysses`. Also the Strategy of its attention sites."""

    def __init__(self, family: Family, mesh: Mesh) -> None:
        self.family, self.mesh, self.group = family, mesh, mesh.sequence
        self.text: list[int] = []
        self.image: list[int] = []
        self.text_tokens = 0

    def root(self, root: Root) -> Root:
        """Starts a forward: nothing is cut yet."""

        def wrapped(arguments: Arguments) -> Tensor:
            self.image, self.text, self.text_tokens = [], [], 0
            if self.family.joint:
                self.text_tokens = arguments["encoder_hidden_states"].shape[1]
                self.text = split(self.text_tokens, self.group.size, last=True)
            out = root(arguments)
            if not self.image:
                raise PlanError(f"{self.family.transformer}: no block ran, so ring and ulysses cut nothing")
            return out

        return wrapped

    def block(self, module: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
        """A block's call on own rows. The first block to run in a forward is given whole streams, and cuts them."""
        names = [name for name in inspect.signature(module.forward).parameters if name != "self"]
        extras = [s for s in self.family.slices if s.source == "block"]

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            kwargs.update(zip(names, args, strict=False))
            if not self.image:
                self._begin(kwargs["hidden_states"].shape[1])
                for name, rows in self.family.streams.items():
                    # A copy with strides of its own, so that compiled blocks see what they see from each other.
                    kwargs[name] = self.cut(kwargs[name], 1, rows).clone(memory_format=torch.contiguous_format)
            for extra in extras:
                value = kwargs.get(str(extra.item))
                if value is not None:
                    kwargs[str(extra.item)] = self.cut(value, extra.dim, extra.rows)
            return call(**kwargs)

        return wrapped

    def prologue(self, slices: list[Slice], call: Callable[..., Any]) -> Callable[..., Any]:
        """The call of a module whose outputs have a row per token (positions, per-token timesteps)."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            out = call(*args, **kwargs)
            items = list(out) if isinstance(out, tuple) else [out]
            for s in slices:
                value = items[int(s.item)]
                if value is not None and (s.ndim is None or value.ndim == s.ndim):
                    items[int(s.item)] = self.cut(value, s.dim, s.rows)
            return tuple(items) if isinstance(out, tuple) else items[0]

        return wrapped

    def exit(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call of the exit module: its rows are gathered, so that what follows sees the whole image."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return self.group.all_gather(METHOD, call(*args, **kwargs), self.image, 1)

        return wrapped

    def cut(self, value: Tensor, dim: int, rows: str) -> Tensor:
        """Own rows of a tensor that has one per token along `dim`."""
        count = value.shape[dim]
        if rows == "image":
            sizes = split(count, self.group.size)
            return value.narrow(dim, start(sizes, self.group.index), sizes[self.group.index])
        if rows == "text":
            return value.narrow(dim, start(self.text, self.group.index), self.text[self.group.index])
        text_first = self.family.joint == "text_first"
        parts = value.split(
            [self.text_tokens, count - self.text_tokens]
            if text_first
            else [count - self.text_tokens, self.text_tokens],
            dim,
        )
        return torch.cat([self.cut(p, dim, r) for p, r in zip(parts, self._order(), strict=True)], dim)

    def _order(self) -> tuple[str, str]:
        return ("text", "image") if self.family.joint == "text_first" else ("image", "text")

    def _begin(self, image_tokens: int) -> None:
        if image_tokens < self.group.size:
            raise PlanError(f"{image_tokens} image tokens cannot be shared by {self.group.size} ring x ulysses ranks")
        self.image = split(image_tokens, self.group.size)

    def attend(
        self, rows: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, local: Local
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
        if ring.size == 1:
            return ulysses_attend(ulysses, sizes, q, k, v, mask, local)
        u = ulysses.size
        blocks = [sum(sizes[i * u : (i + 1) * u]) for i in range(ring.size)]

        def over_ring(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
            return ring_attend(ring, blocks, q, k, v, mask, scale)

        if u == 1:
            return over_ring(q, k, v, mask)
        return ulysses_attend(ulysses, sizes[ring.index * u : (ring.index + 1) * u], q, k, v, mask, over_ring)
