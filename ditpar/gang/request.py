"""One pipeline call on a rank: random states from the caller and back, its callbacks, its progress bar."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ditpar.dataflow.deferred import resolve
from ditpar.gang.calls import CallbackRaised, Event, Marker, Reply, States, facts
from ditpar.gang.wire import dumps, loads

if TYPE_CHECKING:
    from ditpar.gang.rank import Rank


class Request:
    """A call with these arguments; `generator` comes as States, callbacks as a Marker.

    Attributes:
        steps: denoising steps done.
    """

    def __init__(self, rank: Rank, kwargs: dict[str, Any]) -> None:
        self.rank, self.pipe = rank, rank.pipe
        self.steps = 0
        self.kwargs = dict(kwargs)
        self._sent: States = self.kwargs.pop("generator")
        self.generator = self._sent.generators()

    def run(self) -> Any:
        """Rank 0's result, random states afterwards, facts, and events of a trace; None on other ranks."""
        self._sent.set(self.generator)
        callbacks = {
            name: lambda *args, name=name: self._callback(name, args)
            for name, value in self.kwargs.items()
            if value is Marker.CALLBACK
        }
        generator = {} if self.generator is None else {"generator": self.generator}
        result = self.pipe(**{**self.kwargs, **generator, **callbacks})
        if self.rank.number > 0:
            return None
        return result, self._states(), facts(self.pipe), self.pipe._ditpar.events

    def _states(self) -> States:
        return States.of(self.generator, self.rank.device.partition(":")[0])

    def _callback(self, name: str, args: tuple[Any, ...]) -> Any:
        """Has the caller run its callback. It answers all ranks, and may have them do other commands in between."""
        with_pipe = bool(args) and args[0] is self.pipe
        args = resolve(args[1:] if with_pipe else args)
        rank = self.rank
        if rank.number == 0:
            rank.wire.send(b"e", dumps(Event(name, with_pipe, args, self._states(), facts(self.pipe))))
        while True:
            kind, data = rank.replies.get()
            if kind == b"r":
                break
            rank.wire.send(b"n", rank.answer(data))
        reply: Reply = loads(data)
        for place, edited in reply.edits.items():
            tensors = args[-1] if isinstance(args[-1], dict) else args
            tensors[place].copy_(edited)
        for attribute, value in reply.settings.items():
            setattr(self.pipe, attribute, value)
        reply.states.set(self.generator)
        if reply.raised:
            raise CallbackRaised
        return reply.result

    def progress_bar(self, iterable: Any, total: int | None) -> ProgressBar:
        if iterable is None and total is None:
            raise ValueError("Either `total` or `iterable` has to be defined.")
        return ProgressBar(self, iterable, total)

    def tell(self, kind: bytes, value: Any) -> None:
        if self.rank.number == 0:
            self.rank.wire.send(kind, dumps(value))


class ProgressBar:
    """What stock pipelines use of tqdm; each update is a step, which the caller draws."""

    def __init__(self, request: Request, iterable: Any, total: int | None) -> None:
        self.request, self.iterable = request, iterable
        self.total = total if total is not None or not hasattr(iterable, "__len__") else len(iterable)
        request.tell(b"t", self.total)

    def update(self, n: int = 1) -> None:
        self.request.steps += n
        self.request.tell(b"s", self.request.steps)

    def __iter__(self) -> Iterator[Any]:
        for each in self.iterable:
            yield each
            self.update()
        self.close()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        self.request.tell(b"x", None)

    def set_postfix(self, *_: Any, **__: Any) -> None:
        """Accepted as by tqdm; not drawn."""

    set_description = set_postfix_str = set_postfix
