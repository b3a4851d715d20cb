"""Flow: the deferred values of one request, and what happens to the operations on them."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from ditpar.dataflow import rules
from ditpar.dataflow.deferred import Deferred
from ditpar.dataflow.node import Evaluate, Node, unchanging, version
from ditpar.errors import StaleError

_HERE = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
DEEPEST = 64
"""Operations that may wait one behind the other; each takes some frames of Python's stack when it is done."""


class Flow:
    """Deferred values between the calls of one request.

    Args:
        run: runs all transformer calls that are pending, and then calls `ran`.
        owner: whether this rank holds the values. On others they are ghosts: shapes alone.
        share: gives every rank the owner's tensor (None on the others), of a shape and dtype; needed with ghosts.
        lazy: whether row-local operations wait too. Without, only views do, which is right when all ranks own all.

    Attributes:
        forced: how often an operation that crosses rows made everything pending run, by operation and line of code.
    """

    def __init__(
        self,
        run: Callable[[], None],
        owner: bool = True,
        share: Callable[[Tensor | None, torch.Size, torch.dtype, torch.device], Tensor] | None = None,
        lazy: bool = True,
    ) -> None:
        self.run, self.owner, self.share, self.lazy = run, owner, share, lazy
        self.calls = self.done = 0
        self.forced: Counter[tuple[str, str]] = Counter()
        self._live: weakref.WeakValueDictionary[int, Node] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()
        self._held = 0

    def call(self, like: Tensor, device: torch.device, row: int) -> Deferred:
        """The result of one more transformer call, to be filled when it runs."""
        self.calls += 1
        return Deferred(self._new(like, device, row, self.calls))

    def waits(self, value: Any) -> bool:
        """Whether the value depends on calls that have not run."""
        return isinstance(value, Deferred) and value.pending and value._node.after > self.done

    def ran(self) -> None:
        """All calls so far have run. What has been noted is evaluated, so that histories do not chain for ever."""
        self.done = self.calls
        self.hold()
        self._held = next(self._numbers)

    def hold(self, first: int = 0) -> bool:
        """Evaluates what is noted of the values numbered `first` and up; False if some depend on calls yet to run."""
        held = True
        for node in list(self._live.values()):
            if first <= node.number:
                held &= node.hold()
        return held

    def whole(self, node: Node) -> Tensor:
        """The node's plain value on every rank."""
        if node.after > self.done:
            self.run()
        value = node.band(0, node.rows) if self.owner else None
        if self.share is not None:
            value = self.share(value, node.shape, node.meta.dtype, node.device)
        assert value is not None
        if value.stride() != node.meta.stride():
            value = _empty(node.meta, node.device).copy_(value)
        return value

    def count(self, what: str) -> None:
        if self.lazy:
            self.forced[what, _caller()] += 1

    # -- operations ----------------------------------------------------------------------------------------------------

    def dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation with a Deferred among its arguments: noted, or done on plain tensors."""
        if func._schema.is_mutable:
            return self._write(func, args, kwargs)
        args, kwargs = _current((args, kwargs))
        if not rules.nodes_in((args, kwargs)):
            return func(*args, **kwargs)
        if func in rules.LIKE:
            return func(_empty(args[0].meta, args[0].device), *args[1:], **kwargs)
        made = self._note(func, args, kwargs)
        if made is not None:
            return made
        self.count(str(func))
        plain_args, plain_kwargs = _values((args, kwargs))
        if any(value.alias_info for value in func._schema.returns):
            # As a plain tensor it would not count its base's versions.
            outputs = _on_meta(func, args, kwargs)
            return self._noted(func, args, kwargs, outputs, rules.uncut(outputs), True)
        return func(*plain_args, **plain_kwargs)

    def einsum(self, equation: Any, *operands: Any) -> Any:
        """torch.einsum before it becomes products that no longer know their rows."""
        if len(operands) == 1 and isinstance(operands[0], list | tuple):
            operands = tuple(operands[0])
        current = unchanging(_current(operands))
        nodes = rules.nodes_in(current)
        found = rules.einsum(equation, current) if self.lazy and nodes else None
        if found is not None and self._near(nodes):
            out = torch.einsum(equation, *tree_map(_meta, current))
            return self._noted(torch.einsum, (equation, *current), {}, out, [found])
        with torch._C.DisableTorchFunctionSubclass():
            return torch.einsum(equation, *operands)

    def _note(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What a row-local operation will give; None for others."""
        if not (func in rules.VIEWS or (self.lazy and rules.known(func))):
            return None
        args, kwargs = unchanging((args, kwargs))
        outputs = _on_meta(func, args, kwargs)
        found = rules.local(func, args, kwargs, outputs) if self.lazy else rules.uncut(outputs)
        if found is None or not self._near(rules.nodes_in((args, kwargs))):
            return None
        return self._noted(func, args, kwargs, outputs, found)

    def _near(self, nodes: list[Node]) -> bool:
        """Whether what waits behind the operands is short enough to be evaluated in one go."""
        return self._depth(nodes) <= DEEPEST or max(node.after for node in nodes) <= self.done

    def _depth(self, nodes: list[Node]) -> int:
        return 1 + max(node.depth if node.number >= self._held else 0 for node in nodes)

    def _noted(
        self, func: Any, args: Any, kwargs: Any, outputs: Any, found: list[rules.Rows], view: bool = False
    ) -> Any:
        nodes = rules.nodes_in((args, kwargs))
        after = max(node.after for node in nodes)
        depth = self._depth(nodes)
        device = torch.device(kwargs.get("device") or nodes[0].device)
        plain = [(t, version(t)) for t in rules.plain((args, kwargs))]
        many = isinstance(outputs, list | tuple)
        made = []
        for i, (out, rows) in enumerate(zip(outputs if many else [outputs], found, strict=True)):
            evaluate = _checked(rows.evaluate, plain, str(func)) if self.owner and rows.evaluate else None
            of = None
            if view or func in rules.VIEWS:
                of = nodes[0], _viewed(func, args, kwargs, i if many else None)
                nodes[0].viewed = True
            node = self._new(out, device, rows.dim, after, evaluate, of, depth % (DEEPEST + 1))
            if depth > DEEPEST and evaluate is not None:
                node.band(0, node.rows)
            made.append(Deferred(node))
        return type(outputs)(made) if many else made[0]

    def _new(
        self,
        like: Tensor,
        device: torch.device,
        row: int,
        after: int,
        evaluate: Evaluate | None = None,
        view: tuple[Node, Callable[[Tensor], Tensor]] | None = None,
        depth: int = 0,
    ) -> Node:
        node = Node(self, like, device, row, after, evaluate, view, next(self._numbers), depth)
        if self.owner:
            self._live[node.number] = node
        return node

    def _write(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation that writes."""
        if torch.Tag.inplace_view in func.tags:
            name = func.overloadpacket.__name__
            raise NotImplementedError(
                f"a deferred tensor keeps its shape: write x = x.{name.rstrip('_')}(...), not x.{name}(...)"
            )
        current = _current((args, kwargs))
        if isinstance(args[0], Deferred) and self._rewritten(func, args[0], *current):
            return args[0]
        self.before_write(str(func), bool(rules.nodes_in(current)))
        targets = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Deferred)]
        args, kwargs = _values(current)
        result = func(*args, **kwargs)
        if any(target.value().shape != target.shape for target in targets):
            raise NotImplementedError(f"{func}: a deferred tensor keeps its shape, but out= needs another")
        return result

    def before_write(self, what: str, pending: bool = False) -> None:
        """Whatever was computed from the old values is computed first."""
        if pending or self.done < self.calls:
            self.count(what)
        if self.done < self.calls:
            self.run()
        self.hold()

    def _rewritten(self, func: Any, target: Deferred, args: Any, kwargs: Any) -> bool:
        """Lets the target stand for a new value, where that is the same: no view of it would have to change too."""
        node, pure = target._node, rules.functional(func)
        if pure is None or args[0] is not node or node.viewed or node.view is not None:
            return False
        out = _on_meta(pure, args, kwargs)
        if out.shape != node.shape or out.dtype != node.meta.dtype or out.stride() != node.meta.stride():
            return False
        made = self._note(pure, args, kwargs)
        if made is None:
            return False
        target._node = made._node
        return True


def _current(tree: Any) -> Any:
    """The tree with what each Deferred stands for now: a node, or its value if there is one."""
    return tree_map_only(Deferred, lambda d: d._node if d.pending else d.value(), tree)


def _values(tree: Any) -> Any:
    return tree_map_only(Node, Node.value, tree)


def _checked(evaluate: Evaluate, plain: list[tuple[Tensor, int | None]], what: str) -> Evaluate:
    if not plain:
        return evaluate

    def checked(lo: int, hi: int) -> Tensor:
        if any(version(tensor) != seen for tensor, seen in plain):
            raise StaleError(
                f"a tensor that {what} was given was changed in place before its deferred result was needed"
            )
        return evaluate(lo, hi)

    return checked


def _viewed(func: Any, args: Any, kwargs: Any, pick: int | None) -> Callable[[Tensor], Tensor]:
    rest = args[1:]

    def apply(base: Tensor) -> Tensor:
        out = func(base, *rest, **kwargs)
        return out if pick is None else out[pick]

    return apply


def _on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    kwargs = {k: v for k, v in kwargs.items() if k != "device"}
    if func is torch.ops.aten._to_copy.default:
        kwargs["device"] = "meta"
    args, kwargs = tree_map(_meta, (args, kwargs))
    return func(*args, **kwargs)


def _meta(value: Any) -> Any:
    if isinstance(value, Node):
        return value.meta
    if isinstance(value, Tensor):
        return _empty(value, "meta")
    return value


def _empty(like: Tensor, device: Any) -> Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)


def _caller() -> str:
    """The line of the user's, the pipeline's or the scheduler's code that is being run."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_HERE, _TORCH)):
        frame = frame.f_back
    code = frame.f_code
    return f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}"
