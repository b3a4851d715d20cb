"""Sites: attention modules whose one attention call is led to a strategy, without touching the class or any global.

A site's processor is replaced by a twin: same state, of a private subclass whose `__call__` is the stock code with
globals of its own, in which the two names that stock processors use, `F.scaled_dot_product_attention` and
`dispatch_attention_fn`, lead here. One twin class per processor class, and the site as an attribute, so that a compiled
block is shared by all blocks as in stock. Compiled code sees one opaque op (`ditpar::attend`).
"""

from __future__ import annotations

import inspect
import itertools
import sys
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import dispatch_attention_fn as stock_dispatch
from torch import Tensor

from ditpar.errors import PlanError

Local = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""Attention on this device as the site itself would do it: q, k, v [batch, tokens, heads, head_dim], mask."""


class Strategy(Protocol):
    """What happens at a site."""

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
        """q, k, v of this rank's rows [batch, tokens, heads, head_dim] -> the same rows attended to all rows.

        `layer` is the site's number; `rows` says which tokens they are (`joint` or `image`); `local` is attention on
        this device by the site's own backend.
        """
        ...


class Site:
    """One attention module of one transformer, known by number inside compiled code."""

    _numbers = itertools.count()
    _live: ClassVar[weakref.WeakValueDictionary[int, Site]] = weakref.WeakValueDictionary()

    def __init__(self, strategy: Strategy, rows: str, token: Tensor) -> None:
        self.strategy, self.rows, self.token = strategy, rows, token
        self.layer = next(Site._numbers)
        self.number = torch.tensor(self.layer)
        Site._live[self.layer] = self

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, backend: str | None
    ) -> Tensor:
        def local(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
            if mask is not None and mask.ndim == 2:
                mask = mask[:, None, None, :]
            if backend == SDPA:
                q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
                return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(1, 2)
            return stock_dispatch(q, k, v, attn_mask=mask, scale=scale, backend=backend)  # type: ignore[arg-type]

        return self.strategy.attend(self.layer, self.rows, q, k, v, mask, scale, local)


SDPA = "sdpa"
"""Marks a site that calls `F.scaled_dot_product_attention` itself, so has no backend to choose."""


@torch.library.custom_op("ditpar::attend", mutates_args=("token",))
def attend_op(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, backend: str, site: Tensor, token: Tensor
) -> Tensor:
    """The site's attention as one opaque op; `token` orders it among the other sites' collectives."""
    return Site._live[int(site)].attend(q, k, v, mask, scale, backend or None).contiguous()


@attend_op.register_fake
def _(q, k, v, mask, scale, backend, site, token):  # type: ignore[no-untyped-def]
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


def _refuse(**options: Any) -> None:
    for name, value in options.items():
        if value:
            raise PlanError(f"attention {name}={value!r} is not supported with ring, ulysses or pipe; use cfg or data")


def _at_site(
    site: Site, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, backend: Any
) -> Tensor:
    name = None if backend is None else str(getattr(backend, "value", backend))
    if torch.compiler.is_compiling():
        return attend_op(q, k, v, mask, scale, name or "", site.number, site.token)
    return site.attend(q, k, v, mask, scale, name)


def _dispatch_attention_fn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    attention_kwargs: dict[str, Any] | None = None,
    *,
    backend: Any = None,
    parallel_config: Any = None,
) -> Tensor:
    _refuse(dropout_p=dropout_p, is_causal=is_causal, enable_gqa=enable_gqa, attention_kwargs=attention_kwargs)
    return _at_site(parallel_config, query, key, value, attn_mask, scale, backend)


_TWIN_SOURCE = """
def __call__(self, *args, **kwargs):
    global _site
    _site = self._parallel_config
    return _stock_call(self, *args, **kwargs)

def _sdpa(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    _refuse(dropout_p=dropout_p, is_causal=is_causal, enable_gqa=enable_gqa)
    out = _at_site(_site, query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attn_mask, scale, "sdpa")
    return out.transpose(1, 2)
"""


def _unless_empty(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return x if x.numel() == 0 else function(x, *args, **kwargs)

    return wrapped


_twin_classes: dict[type, type] = {}


def _twin_class(cls: type, not_empty: Sequence[str]) -> type:
    if cls not in _twin_classes:
        _twin_classes[cls] = _make_twin_class(cls, not_empty)
    return _twin_classes[cls]


def _make_twin_class(cls: type, not_empty: Sequence[str]) -> type:
    stock = cls.__call__
    if not isinstance(stock, types.FunctionType) or stock.__closure__:
        raise PlanError(f"attention processor {cls.__name__}: its __call__ is no plain function; use cfg or data")
    module = types.ModuleType(f"{__name__}.{cls.__name__}")
    sys.modules[module.__name__] = module
    scope = module.__dict__
    scope.update({k: v for k, v in stock.__globals__.items() if not k.startswith("__")})
    scope.update(_refuse=_refuse, _at_site=_at_site, _site=None, dispatch_attention_fn=_dispatch_attention_fn)
    scope.update({name: _unless_empty(scope[name]) for name in not_empty if name in scope})
    exec(compile(_TWIN_SOURCE, f"<twin of {cls.__name__}>", "exec"), scope)
    functional = types.ModuleType(f"{module.__name__}.F")
    sys.modules[functional.__name__] = functional
    functional.__dict__.update({k: v for k, v in F.__dict__.items() if not k.startswith("__")})
    functional.__dict__["scaled_dot_product_attention"] = scope["_sdpa"]
    scope["F"] = functional
    copied = types.FunctionType(stock.__code__, scope, stock.__name__, stock.__defaults__)
    copied.__kwdefaults__ = stock.__kwdefaults__
    scope["_stock_call"] = copied
    outer = scope["__call__"]
    outer.__signature__ = inspect.signature(stock)
    return type(cls.__name__, (cls,), {"__call__": outer, "__module__": cls.__module__})


def twin(processor: Any, site: Site, not_empty: Sequence[str] = ()) -> Any:
    """The processor's twin, whose attention call goes to `site`. The processor itself is not changed.

    `not_empty` names functions that the processor calls on tensors and that fail on empty ones, which they get past.
    """
    kind: type[Any] = _twin_class(type(processor), not_empty)
    other: Any = object.__new__(kind)
    other.__dict__.update(processor.__dict__)
    other._parallel_config = site
    return other
