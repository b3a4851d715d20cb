"""Group: the only place where ranks exchange tensors, with bytes and messages counted per method.

Point-to-point calls go out as one batch (`batch_isend_irecv`), which NCCL runs as a group call; both sides issue them
in the same order, from one thread. CPU ranks of one host use shared memory for them instead of gloo's loopback TCP.
"""

from __future__ import annotations

import io
import pickle
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ditpar.shared import Channel
from ditpar.trace import Trace, What


@dataclass
class Count:
    """What one method sent from this rank."""

    bytes: int = 0
    messages: int = 0


class Counters(defaultdict[str, Count]):
    """Bytes and messages sent by this rank, per method name; and when, while `trace` is set."""

    def __init__(self) -> None:
        super().__init__(Count)
        self.trace: Trace | None = None

    def span(self, what: What, name: str, **facts: Any) -> AbstractContextManager[None]:
        """A span of the trace, if there is one."""
        return nullcontext() if self.trace is None else self.trace.span(what, name, **facts)

    def sent(self, method: str, tensor: Tensor, times: int = 1) -> None:
        self[method].bytes += tensor.numel() * tensor.element_size() * times
        self[method].messages += times


class Work(Protocol):
    """Something to wait for."""

    def wait(self) -> Any: ...


@dataclass
class _Arrival:
    channel: Channel
    into: Tensor

    def wait(self) -> None:
        self.channel.recv(self.into)


class Group:
    """The ranks along one mesh axis (or several, flattened) and what they exchange.

    Attributes:
        ranks: global ranks, in the axis' order.
        index: this rank's position among them.
        channels: shared-memory channels by global rank; None sends through the process group.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        index: int,
        pg: dist.ProcessGroup | None,
        counters: Counters,
        channels: Mapping[int, Channel] | None = None,
    ) -> None:
        self.ranks = list(ranks)
        self.index = index
        self.pg = pg
        self.counters = counters
        self.channels = channels

    @property
    def size(self) -> int:
        return len(self.ranks)

    def exchange(self, method: str, send: Sequence[Tensor | None], recv: Sequence[Tensor | None]) -> None:
        """Sends `send[i]` to the i-th rank and fills `recv[i]` from it; None and empty tensors are left out.

        Tensors must be contiguous. The own position is ignored.
        """
        peers = [peer for peer in range(self.size) if peer != self.index]
        with self.counters.span("wait", method):
            for work in self._start(method, [(p, send[p]) for p in peers], [(p, recv[p]) for p in peers]):
                work.wait()

    def shift(self, method: str, send: Tensor, recv: Tensor) -> list[Work]:
        """Starts one ring step: `send` goes to the next rank, `recv` is filled by the previous. Returns what to wait for."""
        after, before = (self.index + 1) % self.size, (self.index - 1) % self.size
        return self._start(method, [(after, send)], [(before, recv)])

    def all_gather(self, method: str, mine: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
        """Concatenates every rank's part along `dim`; part i has `sizes[i]` there and may be empty."""
        moved = mine.movedim(dim, 0).contiguous()
        whole = moved.new_empty((sum(sizes), *moved.shape[1:]))
        parts: list[Tensor | None] = list(whole.split(list(sizes)))
        own = parts[self.index]
        assert own is not None
        own.copy_(moved)
        self.exchange(method, [moved] * self.size, parts)
        return whole.movedim(0, dim)

    def send(self, method: str, tensor: Tensor, peer: int, ahead: int) -> Work | None:
        """Starts sending to the `peer`-th rank, which may be up to `ahead` messages behind. Returns what to wait for.

        The tensor must be contiguous and stay as it is until then.
        """
        self.counters.sent(method, tensor)
        if self.channels is not None:
            self.channels[self.ranks[peer]].send(tensor, ahead)
            return None
        return dist.isend(tensor, self.ranks[peer], group=self.pg)

    def recv(self, into: Tensor, peer: int) -> Work:
        """Starts filling a tensor with the next message of the `peer`-th rank. Returns what to wait for."""
        if self.channels is not None:
            return _Arrival(self.channels[self.ranks[peer]], into)
        work = dist.irecv(into, self.ranks[peer], group=self.pg)
        assert work is not None
        return work

    def broadcast(self, method: str, tensor: Tensor, source: int = 0) -> Tensor:
        """Fills `tensor` on every rank with that of the `source`-th rank, in place."""
        if self.size > 1 and tensor.numel():
            if self.index == source:
                self.counters.sent(method, tensor, self.size - 1)
            # The group of all ranks is a CPU one, for control; what lies on GPUs goes by the default group.
            with self.counters.span("wait", method):
                dist.broadcast(tensor, self.ranks[source], group=None if tensor.is_cuda else self.pg)
        return tensor

    def max(self, value: int) -> int:
        """The largest of all ranks' values: how ranks agree on a flag."""
        if self.size == 1:
            return value
        flag = torch.tensor([value], dtype=torch.int64)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.pg)
        return int(flag)

    def max_later(self, value: int) -> tuple[Tensor, Work | None]:
        """Starts agreeing on the largest of all ranks' values: a tensor that holds it once the work has ended."""
        flag = torch.tensor([value], dtype=torch.int64)
        return flag, None if self.size == 1 else dist.all_reduce(
            flag, op=dist.ReduceOp.MAX, group=self.pg, async_op=True
        )

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Every rank's picklable value, in rank order. Only for the group of all ranks."""
        found: list[Any] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(found, value, group=self.pg)
        return found

    def broadcast_tree(self, method: str, value: Any, source: int = 0, device: torch.device | None = None) -> Any:
        """Any picklable value of the `source`-th rank, on all ranks. Its tensors travel as tensors, not in the pickle.

        Only for the group of all ranks. CPU tensors arrive on the CPU, others on `device`.
        """
        if self.size == 1:
            return value
        tensors: list[Tensor] = []
        header: list[Any] = [None, None]
        if self.index == source:
            header[0] = _flatten(value, tensors)
            header[1] = [(t.shape, t.dtype, t.device.type) for t in tensors]
        dist.broadcast_object_list(header, self.ranks[source], group=self.pg)
        if self.index != source:
            tensors = [
                torch.empty(shape, dtype=dtype, device="cpu" if kind == "cpu" else device)
                for shape, dtype, kind in header[1]
            ]
        for i, tensor in enumerate(tensors):
            tensors[i] = self.broadcast(method, tensor.contiguous(), source)
        return value if self.index == source else _unflatten(header[0], tensors)

    def _start(
        self,
        method: str,
        send: Sequence[tuple[int, Tensor | None]],
        recv: Sequence[tuple[int, Tensor | None]],
    ) -> list[Work]:
        out = [(self.ranks[peer], tensor) for peer, tensor in send if tensor is not None and tensor.numel()]
        into = [(self.ranks[peer], tensor) for peer, tensor in recv if tensor is not None and tensor.numel()]
        for _, tensor in out:
            self.counters.sent(method, tensor)
        if self.channels is not None:
            for peer, tensor in out:
                self.channels[peer].send(tensor)
            return [_Arrival(self.channels[peer], tensor) for peer, tensor in into]
        # Receives first: gloo sends once the receiver has said that it is ready, over the same connection as its own data.
        # Said behind those, it would come when they have passed, and the two directions would take turns.
        ops = [dist.P2POp(dist.irecv, tensor, peer, group=self.pg) for peer, tensor in into]
        ops += [dist.P2POp(dist.isend, tensor, peer, group=self.pg) for peer, tensor in out]
        return list(dist.batch_isend_irecv(ops)) if ops else []


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self.tensors = tensors

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, Tensor):
            return None
        self.tensors.append(obj.detach())
        return len(self.tensors) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self.tensors = tensors

    def persistent_load(self, pid: int) -> Tensor:
        return self.tensors[pid]


def _flatten(value: Any, tensors: list[Tensor]) -> bytes:
    file = io.BytesIO()
    _Pickler(file, tensors).dump(value)
    return file.getvalue()


def _unflatten(data: bytes, tensors: list[Tensor]) -> Any:
    return _Unpickler(io.BytesIO(data), tensors).load()
