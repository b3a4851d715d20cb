"""Shared-memory transport between ranks of one host: what gloo would send through loopback TCP, without its copies.

Each ordered pair of ranks has a memfd with two slots. The sender copies into a free slot and announces it over a
Unix socket; the receiver copies out and hands the slot back. Sockets wake the peer, order memory, and tell at once
when a peer is gone; memfds and abstract sockets leave nothing behind.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import struct
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_HEADER = struct.Struct("=cqq")  # kind, slot, bytes
_DATA, _GROWN, _FREE = b"d", b"g", b"f"
_SLOTS = 2
_PAGE = mmap.PAGESIZE


class PeerGone(RuntimeError):
    """The process at the other end of a channel has ended."""


class Channel:
    """Both directions between this rank and one peer."""

    def __init__(self, sock: socket.socket, peer: int, timeout: float) -> None:
        sock.settimeout(timeout)
        self.sock, self.peer = sock, peer
        self._out: Tensor | None = None
        self._in: Tensor | None = None
        self._free = deque(range(_SLOTS))
        self._arrived: deque[tuple[int, int]] = deque()

    def send(self, tensor: Tensor) -> None:
        """Copies the tensor out; waits only when the peer is two messages behind."""
        size = tensor.numel() * tensor.element_size()
        while not self._free:
            self._receive()
        kind, fds = _DATA, []
        if self._out is None or self._out.shape[1] < size:
            while len(self._free) < _SLOTS:
                self._receive()
            fd, self._out = _memory(size)
            kind, fds = _GROWN, [fd]
        slot = self._free.popleft()
        _as(self._out[slot], tensor).copy_(tensor)
        try:
            socket.send_fds(self.sock, [_HEADER.pack(kind, slot, size)], fds)
        except (BrokenPipeError, ConnectionResetError):
            raise PeerGone(f"rank {self.peer} has ended") from None
        for fd in fds:
            os.close(fd)

    def recv(self, into: Tensor) -> None:
        """Fills `into` with the peer's next message."""
        while not self._arrived:
            self._receive()
        slot, size = self._arrived.popleft()
        if size != into.numel() * into.element_size():
            raise RuntimeError(f"rank {self.peer} sent {size} bytes where {list(into.shape)} {into.dtype} was expected")
        assert self._in is not None
        into.copy_(_as(self._in[slot], into))
        self._say(_FREE, slot)

    def _say(self, kind: bytes, slot: int) -> None:
        try:
            self.sock.send(_HEADER.pack(kind, slot, 0))
        except (BrokenPipeError, ConnectionResetError):
            raise PeerGone(f"rank {self.peer} has ended") from None

    def _receive(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self.sock, _HEADER.size, 1)
        except ConnectionResetError:
            data, fds = b"", []
        except TimeoutError:
            raise TimeoutError(f"rank {self.peer} sent nothing for {self.sock.gettimeout():.0f} s") from None
        if not data:
            raise PeerGone(f"rank {self.peer} has ended")
        kind, slot, size = _HEADER.unpack(data)
        if kind == _FREE:
            self._free.append(slot)
            return
        if kind == _GROWN:
            self._in = _mapped(fds[0])
            os.close(fds[0])
        self._arrived.append((slot, size))


def _as(slot: Tensor, like: Tensor) -> Tensor:
    return slot[: like.numel() * like.element_size()].view(like.dtype).view(like.shape)


def _memory(size: int) -> tuple[int, Tensor]:
    slot = -(-size // _PAGE) * _PAGE
    fd = os.memfd_create("ditpar", os.MFD_CLOEXEC)
    os.ftruncate(fd, slot * _SLOTS)
    return fd, _mapped(fd)


def _mapped(fd: int) -> Tensor:
    """[slots, bytes] over the file's memory, which lives as long as the tensor."""
    return torch.frombuffer(mmap.mmap(fd, 0), dtype=torch.uint8).view(_SLOTS, -1)


def host_key() -> str:
    """Equal for processes that can share memory and abstract sockets: same kernel, network namespace and user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/net')} {os.getuid()}"


def connect(rank: int, world: int, all_gather: Callable[[Any], list[Any]], timeout: float) -> dict[int, Channel] | None:
    """Channels to all other ranks; None, on all ranks alike, when they are not all on this host.

    Args:
        all_gather: gives every rank's object to every rank, in rank order.
        timeout: seconds without a message after which a wait fails.
    """
    name = f"\0ditpar-{secrets.token_hex(12)}"
    able = hasattr(os, "memfd_create") and hasattr(socket, "SOCK_SEQPACKET") and Path("/proc/self/ns/net").exists()
    with socket.socket(socket.AF_UNIX, getattr(socket, "SOCK_SEQPACKET", socket.SOCK_STREAM)) as listener:
        if able:
            listener.bind(name)
            listener.listen(world)
            listener.settimeout(timeout)
        hosts = all_gather((host_key() if able else None, name))
        if len({key for key, _ in hosts}) != 1 or not able:
            return None
        channels = {}
        for peer in range(rank):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.connect(hosts[peer][1])
            sock.send(rank.to_bytes(4, "little"))
            channels[peer] = Channel(sock, peer, timeout)
        for _ in range(rank + 1, world):
            sock, _ = listener.accept()
            peer = int.from_bytes(sock.recv(4), "little")
            channels[peer] = Channel(sock, peer, timeout)
    return channels
