"""Shared-memory transport between ranks of one host: what gloo would send through loopback TCP, without its copies.

Each ordered pair of ranks has slots, each a memfd. The sender copies into a free slot and announces it over a Unix
socket; the receiver copies out and hands the slot back. Sockets wake the peer, order memory, and tell at once when a
peer is gone; memfds and abstract sockets leave nothing behind.
"""

from __future__ import annotations

import mmap
import os
import secrets
import select
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
LOCK_STEP = 2
"""Messages ahead of the peer where both ranks do the same thing at the same time."""
_PAGE = mmap.PAGESIZE
_SOCKET_BYTES = 4 << 20
"""For announcements that the peer has not read yet: a sender blocked by these could block a whole ring."""


class PeerGone(RuntimeError):
    """The process at the other end of a channel has ended."""


class Channel:
    """Both directions between this rank and one peer."""

    def __init__(self, sock: socket.socket, peer: int, timeout: float) -> None:
        sock.settimeout(timeout)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        self.sock, self.peer = sock, peer
        self._out: dict[int, Tensor] = {}
        self._in: dict[int, Tensor] = {}
        self._free: deque[int] = deque()
        self._arrived: deque[tuple[int, int]] = deque()

    def send(self, tensor: Tensor, ahead: int = LOCK_STEP) -> None:
        """Copies the tensor out; waits only when the peer is `ahead` messages behind."""
        size = tensor.numel() * tensor.element_size()
        while select.select([self.sock], [], [], 0)[0]:  # slots handed back, which else would fill the peer's socket
            self._receive()
        while not self._free and len(self._out) >= ahead:
            self._receive()
        slot = next((s for s in self._free if self._out[s].numel() >= size), None)
        kind, fds = _DATA, []
        if slot is not None:
            self._free.remove(slot)
        else:
            slot = self._free.popleft() if len(self._out) >= ahead else len(self._out)
            fd, self._out[slot] = _memory(size)
            kind, fds = _GROWN, [fd]
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
            self._in[slot] = _mapped(fds[0])
            os.close(fds[0])
        self._arrived.append((slot, size))


def _as(slot: Tensor, like: Tensor) -> Tensor:
    return slot[: like.numel() * like.element_size()].view(like.dtype).view(like.shape)


def _memory(size: int) -> tuple[int, Tensor]:
    fd = os.memfd_create("ditpar", os.MFD_CLOEXEC)
    os.ftruncate(fd, -(-size // _PAGE) * _PAGE)
    return fd, _mapped(fd)


def _mapped(fd: int) -> Tensor:
    """The file's memory as bytes, which lives as long as the tensor."""
    return torch.frombuffer(mmap.mmap(fd, 0), dtype=torch.uint8)


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
    able = hasattr(os, "memfd_create") and Path("/proc/self/ns/net").exists()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
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
