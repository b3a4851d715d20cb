"""Links between stages: one-way, in order, sent without waiting, received into buffers posted one message ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from torch import Tensor

from ditpar.comm import Group, Work

AHEAD = 256
"""Messages that a sender may be ahead of its receiver: more than a round has (`MAX_PATCHES`, both branches, text), since a
stage that waited for the next one to receive could wait for itself around the ring."""


class Link:
    """One direction between two stages. Both ends know the shapes, so there are no headers."""

    def __init__(self, group: Group, peer: int, method: str) -> None:
        self.group, self.peer, self.method = group, peer, method
        self._sent: deque[tuple[Tensor, Work]] = deque()
        self._posted: deque[tuple[list[Tensor], list[Work]]] = deque()

    def send(self, *tensors: Tensor) -> None:
        """Sends; empty tensors are left out."""
        for tensor in tensors:
            if tensor.numel():
                tensor = tensor.contiguous()
                with self.group.counters.span("send", self.method, bytes=tensor.nbytes):
                    work = self.group.send(self.method, tensor, self.peer, AHEAD)
                if work is not None:
                    self._sent.append((tensor, work))
        while len(self._sent) > AHEAD:
            self._sent.popleft()[1].wait()

    def post(self, *buffers: Tensor) -> None:
        """Says where the message after those posted so far is to go."""
        works = [self.group.recv(b, self.peer) for b in buffers if b.numel()]
        self._posted.append((list(buffers), works))

    @property
    def posted(self) -> int:
        return len(self._posted)

    def take(self, make: Callable[[], list[Tensor]] | None = None) -> list[Tensor]:
        """Waits for the next message, posting buffers for it first if none are."""
        if not self._posted:
            assert make is not None
            self.post(*make())
        buffers, works = self._posted.popleft()
        with self.group.counters.span("wait", self.method):
            for work in works:
                work.wait()
        return buffers

    def finish(self) -> None:
        """Waits until all that was sent has left."""
        while self._sent:
            self._sent.popleft()[1].wait()
