"""What may differ between ranks is agreed on before it can matter: random state, arguments, interrupts, callbacks."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ditpar.comm import Group
from ditpar.dataflow.deferred import resolve
from ditpar.dataflow.node import version
from ditpar.errors import RequestError

METHOD = "control"


def agree_on_arguments(group: Group, call: Mapping[str, Any]) -> None:
    """Raises RequestError on every rank when ranks were called with different plain arguments."""
    plain = {k: v for k, v in call.items() if _is_plain(v)}
    digests = {k: hashlib.sha256(repr(v).encode()).hexdigest() for k, v in plain.items()}
    first = group.broadcast_tree(METHOD, digests)
    differ = sorted(k for k in first.keys() | digests.keys() if first.get(k) != digests.get(k))
    if group.max(int(bool(differ))):
        names = ", ".join(differ) if differ else "on another rank"
        raise RequestError(f"ranks were called with different arguments: {names}")


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(v) for v in value)
    return value is None or isinstance(value, str | int | float | bool)


def agree_on_random_state(group: Group, generator: Any) -> None:
    """Gives every rank rank 0's state: of the passed generators, or of the default one when there is none.

    Stock code draws alike on every rank from there, so that each caller's generator ends as in a single run.
    """
    generators = generator if isinstance(generator, list | tuple) else [generator] if generator is not None else []
    if not generators:
        generators = [torch.default_generator]
        if torch.cuda.is_initialized():
            generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    states = group.broadcast_tree(METHOD, [g.get_state() for g in generators])
    for g, state in zip(generators, states, strict=True):
        g.set_state(state)


def plain_callback(callback: Callable[..., Any]) -> Callable[..., Any]:
    """The older kind of step callback, which is given true values too."""

    def wrapped(*args: Any) -> Any:
        return callback(*resolve(args))

    return wrapped


class Interrupts:
    """Whether to stop, agreed on at each step: any rank's wish holds for all, at the same step.

    Args:
        lag: steps that an answer may take. Without one, all ranks meet at each step; with one, a wish holds up to `lag`
            steps later, and ranks that far apart do not wait for each other.
    """

    def __init__(self, group: Group, lag: int) -> None:
        self.group, self.lag = group, lag
        self._asked: deque[tuple[torch.Tensor, Any]] = deque()

    def agreed(self, wish: bool) -> bool:
        self._asked.append(self.group.max_later(int(wish)))
        return self._answer() if len(self._asked) > self.lag else False

    def end(self) -> None:
        """Takes the answers that nobody waited for."""
        while self._asked:
            self._answer()

    def _answer(self) -> bool:
        flag, work = self._asked.popleft()
        if work is not None:
            work.wait()
        return bool(flag)


def watching_callback(callback: Callable[..., Any]) -> Callable[..., Any]:
    """A step callback that asked for no tensors: ranks need not meet for it, so it cannot edit any either.

    Raises RequestError when it does.
    """

    def wrapped(*args: Any) -> dict[str, Any]:
        result = callback(*args)
        if result:
            raise RequestError(
                f"callback_on_step_end returned {', '.join(result)} but callback_on_step_end_tensor_inputs is empty; "
                "name the tensors there that it edits"
            )
        return {}

    return wrapped


def _writing_of(value: Any) -> Callable[[Any], bool]:
    """Tells later on whether the value was written to; where torch does not count that, by a copy."""
    if not isinstance(value, torch.Tensor):
        return lambda _: False
    seen = version(value)
    if seen is not None:
        return lambda now: version(now) != seen
    copy = value.clone()
    return lambda now: not torch.equal(now, copy)


def agreed_callback(group: Group, callback: Callable[..., Any]) -> Callable[..., Any]:
    """The caller's step callback; what it returns or edits on rank 0 holds on all ranks."""

    def wrapped(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        # True values on all ranks beforehand: what a callback reads may differ from rank to rank.
        tensors = resolve(tensors)
        given = {k: (v, _writing_of(v)) for k, v in tensors.items()}
        result = callback(pipe, step, timestep, tensors)
        result = {} if result is None else resolve(dict(result))  # it may have called the transformer
        edited = {
            k
            for k, v in [*result.items(), *tensors.items()]
            if k not in given or v is not given[k][0] or given[k][1](v)
        }
        if group.max(int(bool(edited))):
            # What no rank edited stays the same object, and what one did is another object on all: branches are told
            # apart by their tensors.
            names = set().union(*group.all_gather_objects(edited))
            device = next((v.device for v, _ in given.values() if isinstance(v, torch.Tensor)), None)
            mine = {k: v for k, v in {**tensors, **result}.items() if k in names}
            result = group.broadcast_tree(METHOD, mine, device=device)
            result = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in result.items()}
        return result

    return wrapped
