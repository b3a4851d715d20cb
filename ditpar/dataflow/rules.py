"""Which operations are row-local, and how rows of their results come from rows of their arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ditpar.dataflow.node import Evaluate, Node

aten: Any = torch.ops.aten


class Rows(NamedTuple):
    """The row dim of a result, and how its rows [lo, hi) are computed."""

    dim: int
    evaluate: Evaluate | None


VIEWS = frozenset(
    {
        aten.alias.default,
        aten.chunk.default,
        aten.detach.default,
        aten.expand.default,
        aten.permute.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.t.default,
        aten.transpose.int,
        aten.unbind.int,
        aten.unsqueeze.default,
        aten.view.default,
        aten._unsafe_view.default,
    }
)
LIKE = frozenset(
    getattr(aten, f"{name}_like").default for name in ("empty", "full", "ones", "rand", "randn", "zeros")
) | {aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default}
"""Operations that look at shape, dtype and device alone."""
_COPIES = frozenset({aten.clone.default, aten._to_copy.default})
_ALONG = frozenset(
    {
        aten.all.dim,
        aten.amax.default,
        aten.amin.default,
        aten.any.dim,
        aten.linalg_vector_norm.default,
        aten.norm.ScalarOpt_dim,
        aten.prod.dim_int,
        aten.std.correction,
        aten.var.correction,
    }
)
"""Reductions along given dims. Not sum, mean, softmax: their order of summation depends on how many rows there are."""
_WITHIN = frozenset({aten.cumsum.default})
"""Operations along given dims that keep the shape."""
UNEVEN = frozenset(
    {
        *("atan2", "atanh", "cosh", "exp2", "hypot", "igamma", "igammac", "ldexp", "logaddexp", "logaddexp2", "logit"),
        *("celu", "elu", "gelu", "gelu_backward", "mish", "selu", "sigmoid", "silu", "silu_backward", "softplus"),
        *("rsqrt", "sinh", "special_i0e"),
    }
)
"""Pointwise operations whose last bit depends on where in memory an element lies: torch computes the end of a run of
elements, too short for a vector, by another formula."""
EXACT_POWERS = (0, 1, 2, 3, 0.5, -1, -2)


def nodes_in(tree: Any) -> list[Node]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Node)]


def plain(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def known(func: Any) -> bool:
    """Whether an operation may be row-local, depending on its arguments."""
    return func in _RULES or is_pointwise(func)


def is_pointwise(func: Any) -> bool:
    """Whether each element of the result depends on its own operands alone, to the last bit, and is a new one."""
    tags, schema = func.tags, func._schema
    return (
        torch.Tag.pointwise in tags
        and torch.Tag.nondeterministic_seeded not in tags
        and func.overloadpacket.__name__ not in UNEVEN
        and all(str(value.type) == "Tensor" and not value.alias_info for value in schema.returns)
    )


def functional(func: Any) -> Any:
    """For a pointwise operation that writes to its first operand: the one that gives a new tensor; else None."""
    name, overload = func._schema.name.split("::")[1], func._overloadname
    packet = getattr(aten, name[:-1], None) if name.endswith("_") and not name.endswith("__") else None
    found = getattr(packet, overload, None) if packet is not None else None
    return found if found is not None and found not in _RULES and is_pointwise(found) else None


def local(func: Any, args: Any, kwargs: Any, outputs: Any) -> list[Rows] | None:
    """Rows of each output, or None when the operation is not row-local.

    Args:
        func: an operation that is `known`.
        outputs: what the operation gives on meta tensors: one tensor or several.
    """
    if func not in _RULES:
        found = _pointwise(func, args, kwargs, outputs)
        return None if found is None else [found]
    return _RULES[func](func, args, kwargs, outputs)


def uncut(outputs: Any) -> list[Rows]:
    """For views that nobody will ask for bands of."""
    return [Rows(0, None)] * (len(outputs) if isinstance(outputs, list | tuple) else 1)


def _common(nodes: Sequence[Node], ndim: int) -> tuple[int, int] | None:
    """The row dim (aligned from the right in `ndim` dims) and number of rows that all share."""
    places = {(node.row + ndim - node.ndim, node.rows) for node in nodes}
    return places.pop() if len(places) == 1 else None


def _cut(value: Any, dim: int, rows: int, lo: int, hi: int) -> Any:
    """Rows of an operand: of a node, or of a plain tensor that has them along `dim`."""
    if isinstance(value, Node):
        return value.source(lo, hi)
    if isinstance(value, Tensor) and 0 <= dim < value.ndim and value.shape[dim] == rows:
        return value.narrow(dim, lo, hi - lo)
    return value


def _pointwise(func: Any, args: Any, kwargs: Any, out: Any) -> Rows | None:
    if not isinstance(out, Tensor) or not exact(func, args, kwargs):
        return None
    place = _common(nodes_in((args, kwargs)), out.ndim)
    if place is None or out.shape[place[0]] != place[1]:
        return None
    dim, rows = place

    def evaluate(lo: int, hi: int) -> Tensor:
        def cut(value: Any) -> Any:
            back = value.ndim - out.ndim if isinstance(value, Tensor) else 0
            return _cut(value, dim + back, rows, lo, hi)

        cut_args, cut_kwargs = tree_map(cut, (args, kwargs))
        return func(*cut_args, **cut_kwargs)

    return Rows(dim, evaluate)


def exact(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a pointwise operation gives the same bits wherever an element lies, with these scalars."""
    if func.overloadpacket is aten.pow:
        return not isinstance(args[0], int | float) and isinstance(args[1], int | float) and args[1] in EXACT_POWERS
    return _named(func, args, kwargs, "alpha", 1) in (1, -1)  # multiplied and added in one rounding or in two


def _joined(func: Any, args: Any, kwargs: Any, out: Any) -> list[Rows] | None:
    """cat and stack."""
    tensors = args[0]
    stacks = func is aten.stack.default
    dim = _named(func, args, kwargs, "dim", 0) % out.ndim
    nodes = nodes_in(tensors)
    if len({t.ndim for t in tensors}) > 1:
        return None
    if not stacks and {node.row for node in nodes} == {dim}:
        return [Rows(dim, _along(tensors, dim, out.dtype))]
    place = _common(nodes, tensors[0].ndim)
    if place is None:
        return None
    row, rows = place
    if any(t.shape[row] != rows for t in tensors):
        return None

    def evaluate(lo: int, hi: int) -> Tensor:
        return func([_cut(t, row, rows, lo, hi) for t in tensors], dim)

    return [Rows(row + (stacks and dim <= row), evaluate)]


def _along(tensors: Sequence[Any], row: int, dtype: torch.dtype) -> Evaluate:
    """Rows of tensors laid end to end."""

    def evaluate(lo: int, hi: int) -> Tensor:
        parts, first = [], 0
        for t in tensors:
            a, b = max(lo - first, 0), min(hi - first, t.shape[row])
            if a < b:
                parts.append(t.source(a, b) if isinstance(t, Node) else t.narrow(row, a, b - a))
            first += t.shape[row]
        return torch.cat(parts, row).to(dtype)  # cat copies a single part too, as it must

    return evaluate


def _same(func: Any, args: Any, kwargs: Any, out: Any) -> list[Rows]:
    node: Node = args[0]
    return [Rows(node.row, lambda lo, hi: func(node.source(lo, hi), *args[1:], **kwargs))]


def _moved(place: Callable[[Node, Any], int | None]) -> Callable[..., list[Rows] | None]:
    """A rule for views that carry the row dim elsewhere: `place(node, args)`, None if it does not survive."""

    def rule(func: Any, args: Any, kwargs: Any, out: Any) -> list[Rows] | None:
        node: Node = args[0]
        dim = place(node, args)
        if dim is None:
            return None
        return [Rows(dim, lambda lo, hi: func(node.source(lo, hi), *args[1:], **kwargs))]

    return rule


def _transposed(node: Node, args: Any) -> int:
    a, b = (d % node.ndim for d in args[1:3])
    return {a: b, b: a}.get(node.row, node.row)


def _squeezed(func: Any, args: Any, kwargs: Any, out: Any) -> list[Rows] | None:
    """The dims that go are those of the whole: a band of one row must keep its row dim."""
    node: Node = args[0]
    dims = range(node.ndim) if len(args) == 1 else [args[1]] if isinstance(args[1], int) else args[1]
    gone = {d % node.ndim for d in dims if node.shape[d] == 1}
    if node.row in gone:
        return None
    row = node.row - sum(d < node.row for d in gone)
    return [Rows(row, lambda lo, hi: node.source(lo, hi).squeeze(tuple(gone)))]


def _unsqueezed(node: Node, args: Any) -> int:
    return node.row + (args[1] % (node.ndim + 1) <= node.row)


def _selected(node: Node, args: Any) -> int | None:
    dim = args[1] % node.ndim
    return None if dim == node.row else node.row - (dim < node.row)


def _sliced(func: Any, args: Any, kwargs: Any, out: Any) -> list[Rows] | None:
    node: Node = args[0]
    dim, first, _, step = ([*args[1:], None, None, None, None])[:4]
    if (dim or 0) % node.ndim != node.row:
        return _same(func, args, kwargs, out)
    if step not in (None, 1):
        return None
    skip = 0 if first is None else min(max(first + node.rows if first < 0 else first, 0), node.rows)
    return [Rows(node.row, lambda lo, hi: node.source(lo + skip, hi + skip))]


def _pieces(func: Any, args: Any, kwargs: Any, outputs: Any) -> list[Rows]:
    """split and chunk, along the rows or across them; unbind across them."""
    node: Node = args[0]
    dim = _named(func, args, kwargs, "dim", 0) % node.ndim
    found, first = [], 0
    for i, out in enumerate(outputs):
        if dim == node.row:
            found.append(Rows(dim, lambda lo, hi, first=first: node.source(lo + first, hi + first)))  # type: ignore[misc]
            first += out.shape[dim]
        else:
            row = node.row - (func is aten.unbind.int and dim < node.row)
            found.append(Rows(row, lambda lo, hi, i=i: func(node.source(lo, hi), *args[1:], **kwargs)[i]))  # type: ignore[misc]
    return found


def _unbound(func: Any, args: Any, kwargs: Any, outputs: Any) -> list[Rows] | None:
    node: Node = args[0]
    if _named(func, args, kwargs, "dim", 0) % node.ndim == node.row:
        return None
    return _pieces(func, args, kwargs, outputs)


def _viewed(func: Any, args: Any, kwargs: Any, out: Any) -> list[Rows] | None:
    """Views and expansions that keep the row dim whole."""
    node: Node = args[0]
    if func is aten.expand.default:
        dim: int | None = node.row + out.ndim - node.ndim
        dim = dim if out.shape[dim] == node.rows else None
    else:
        before = math.prod(node.shape[: node.row])
        places = (d for d in range(out.ndim) if math.prod(out.shape[:d]) == before and out.shape[d] == node.rows)
        dim = next(places, None)
    if dim is None:
        return None
    row = dim

    def evaluate(lo: int, hi: int) -> Tensor:
        shape = [*out.shape[:row], hi - lo, *out.shape[row + 1 :]]
        part = node.source(lo, hi)
        return part.expand(shape) if func is aten.expand.default else part.reshape(shape)

    return [Rows(row, evaluate)]


def _dims(func: Any, args: Any, kwargs: Any, ndim: int) -> set[int] | None:
    dims = _named(func, args, kwargs, "dim", None)
    if dims is None or dims == []:
        return None
    return {d % ndim for d in ([dims] if isinstance(dims, int) else dims)}


def _reduced(func: Any, args: Any, kwargs: Any, out: Any) -> list[Rows] | None:
    node: Node = args[0]
    dims = _dims(func, args, kwargs, node.ndim)
    if dims is None or node.row in dims:
        return None
    gone = func in _ALONG and not _named(func, args, kwargs, "keepdim", False)
    row = node.row - (sum(d < node.row for d in dims) if gone else 0)
    return [Rows(row, lambda lo, hi: func(node.source(lo, hi), *args[1:], **kwargs))]


def _named(func: Any, args: Any, kwargs: Any, name: str, default: Any) -> Any:
    """An argument of an operation by the name that its schema gives it."""
    if name in kwargs:
        return kwargs[name]
    names = [a.name for a in func._schema.arguments]
    place = names.index(name) if name in names else len(args)
    return args[place] if place < len(args) else default


def einsum(equation: Any, operands: Sequence[Any]) -> Rows | None:
    """Rows of a sum of products of two operands whose row index is kept, not summed over.

    With one operand it may be a view, with three the order of the products depends on the sizes.
    """
    if not isinstance(equation, str) or "->" not in equation or len(operands) != 2:
        return None
    left, right = equation.replace(" ", "").split("->")
    terms = left.split(",")
    free = [chr(c) for c in range(0x3B1, 0x3C9)]  # Greek letters for the dims that "..." stands for
    width = max((op.ndim - len(t) + 3 for t, op in zip(terms, operands, strict=True) if "..." in t), default=0)

    def spelled(term: str, ndim: int) -> str:
        dots = ndim - len(term) + 3
        return term.replace("...", "".join(free[width - dots : width])) if "..." in term else term

    spelled_terms = [spelled(t, op.ndim) for t, op in zip(terms, operands, strict=True)]
    result = right.replace("...", "".join(free[:width]))
    places = {(t[op.row], op.rows) for t, op in zip(spelled_terms, operands, strict=True) if isinstance(op, Node)}
    if len(places) != 1:
        return None
    label, rows = places.pop()
    if result.count(label) != 1 or any(t.count(label) > 1 for t in spelled_terms):
        return None
    if any(
        op.shape[t.index(label)] not in (1, rows) for t, op in zip(spelled_terms, operands, strict=True) if label in t
    ):
        return None

    def evaluate(lo: int, hi: int) -> Tensor:
        return torch.einsum(
            equation, *[_cut(op, t.find(label), rows, lo, hi) for t, op in zip(spelled_terms, operands, strict=True)]
        )

    return Rows(result.index(label), evaluate)


_RULES: dict[Any, Callable[..., list[Rows] | None]] = {
    aten.cat.default: _joined,
    aten.stack.default: _joined,
    aten.alias.default: _same,
    aten.detach.default: _same,
    aten.slice.Tensor: _sliced,
    aten.permute.default: _moved(lambda node, args: [d % node.ndim for d in args[1]].index(node.row)),
    aten.transpose.int: _moved(_transposed),
    aten.t.default: _moved(lambda node, _: node.ndim - 1 - node.row),
    aten.squeeze.default: _squeezed,
    aten.squeeze.dim: _squeezed,
    aten.squeeze.dims: _squeezed,
    aten.unsqueeze.default: _moved(_unsqueezed),
    aten.select.int: _moved(_selected),
    aten.split.Tensor: _pieces,
    aten.split_with_sizes.default: _pieces,
    aten.chunk.default: _pieces,
    aten.unbind.int: _unbound,
    aten.view.default: _viewed,
    aten._unsafe_view.default: _viewed,
    aten.expand.default: _viewed,
    **dict.fromkeys(_COPIES, _same),
    **dict.fromkeys(_ALONG | _WITHIN, _reduced),
}
