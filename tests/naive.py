"""PipeFusion worked out by hand in one process, for comparison: whole stock forwards, one for each band of each step.

Every forward computes all rows, but only the rows of its band are kept: of the output, and of the keys and values, which
replace those of the last time. Nothing of ditpar's own machinery is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import diffusers.models.attention_dispatch as dispatch
import torch
import torch.nn.functional as F
from torch import Tensor

from ditpar.family import Family


class Naive:
    """Runs a pipeline's transformers as M bands would be run.

    Args:
        bands: (first row, end) of the latents' row dim.
        warmup: whole steps at the beginning.

    Attributes:
        states: after each band, by site, the sum and norm of its keys and values of all rows.
    """

    def __init__(self, family: Family, bands: Sequence[tuple[int, int]], warmup: int) -> None:
        self.family, self.bands, self.warmup = family, bands, warmup
        self.kept: dict[Any, tuple[Tensor, Tensor]] = {}
        self.steps: dict[Any, int] = {}
        self.states: list[dict[str, tuple[float, float]]] = []
        self._site: tuple[str, str] | None = None
        self._branch: Any = None
        self._band: tuple[int, int, int] | None = None  # first row, end, rows
        self._text = 0

    @contextmanager
    def on(self, transformer: Any) -> Iterator[None]:
        stock_forward, sdpa, dispatched = (
            transformer.forward,
            F.scaled_dot_product_attention,
            dispatch.dispatch_attention_fn,
        )
        sites = []
        for name in self.family.blocks:
            for i, block in enumerate(getattr(transformer, name)):
                for site, rows in self.family.sites.items():
                    if getattr(block, site, None) is not None:
                        sites.append((f"{name}.{i}.{site}", getattr(block, site), rows))

        def at_site(path: str, rows: str, forward: Any) -> Any:
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                self._site = (path, rows)
                return forward(*args, **kwargs)

            return wrapped

        def sdpa_here(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            k, v = self._replaced(k.transpose(1, 2), v.transpose(1, 2))
            return sdpa(q, k.transpose(1, 2), v.transpose(1, 2), *args, **kwargs)

        def dispatch_here(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return dispatched(q, *self._replaced(k, v), *args, **kwargs)

        import sys

        module = sys.modules[type(transformer).__module__]
        try:
            transformer.forward = self._banded(stock_forward)
            for path, site, rows in sites:
                site.forward = at_site(path, rows, site.forward)
            if hasattr(module, "dispatch_attention_fn"):
                module.dispatch_attention_fn = dispatch_here
            else:
                F.scaled_dot_product_attention = sdpa_here
            yield
        finally:
            F.scaled_dot_product_attention = sdpa
            if hasattr(module, "dispatch_attention_fn"):
                module.dispatch_attention_fn = dispatched
            del transformer.forward
            for _, site, _ in sites:
                del site.forward

    def _banded(self, forward: Any) -> Any:
        def wrapped(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            self._branch = id(kwargs["encoder_hidden_states"])
            self._text = kwargs["encoder_hidden_states"].shape[1] if self.family.joint else 0
            step = self.steps[self._branch] = self.steps.get(self._branch, -1) + 1
            dim = self.family.embed.dim
            rows = hidden_states.shape[dim]
            out = None
            for lo, hi in [(0, rows)] if step < self.warmup else self.bands:
                self._band = (lo, hi, rows)
                (given,) = forward(hidden_states, *args, **{**kwargs, "return_dict": False})
                self._note()
                out = torch.zeros_like(given) if out is None else out
                out.narrow(dim, lo, hi - lo).copy_(given.narrow(dim, lo, hi - lo))
            return (out,)

        return wrapped

    def _replaced(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [batch, tokens, heads, head_dim] of a site: new ones of the band, old ones elsewhere."""
        if self._site is None:  # cross-attention
            return k, v
        (path, rows), self._site = self._site, None
        assert self._band is not None
        lo, hi, total = self._band
        text = self._text if rows == "joint" else 0
        image = k.shape[1] - text
        first, end = lo * image // total, hi * image // total
        offset = text if self.family.joint == "text_first" else 0
        fresh = torch.zeros(k.shape[1], dtype=torch.bool)
        fresh[offset + first : offset + end] = True
        if lo == 0 and text:
            fresh[:text] = True if self.family.joint == "text_first" else fresh[:text]
            if self.family.joint == "image_first":
                fresh[image:] = True
        old = self.kept.get((self._branch, path), (torch.zeros_like(k), torch.zeros_like(v)))
        keep = [torch.where(fresh[None, :, None, None], new, was) for new, was in zip((k, v), old, strict=True)]
        self.kept[self._branch, path] = (keep[0], keep[1])
        return keep[0], keep[1]

    def _note(self) -> None:
        state = {path: k for (branch, path), k in self.kept.items() if branch == self._branch}
        self.states.append({path: measured(*kv) for path, kv in state.items()})


def measured(k: Tensor, v: Tensor) -> tuple[float, float]:
    """Two numbers that tell keys and values apart, whatever the order of their rows."""
    return float(k.double().pow(2).sum() + v.double().pow(3).sum()), float(k.double().norm() + 2 * v.double().norm())
