"""Messages between the caller, the fork server and the ranks: pickles with a length before them, on Unix sockets."""

from __future__ import annotations

import io
import pickle
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

_HEADER = struct.Struct("<cQ")  # kind, bytes that follow
_PART = 1 << 20
_MAX_FDS = 4


class Wire:
    """One end of a socket, for a process that may wait on it. `send` may be called from several threads."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, kind: bytes, data: bytes = b"", fds: Sequence[int] = ()) -> None:
        """Sends a message of a one-letter kind. File descriptors arrive as duplicates."""
        with self._lock:
            socket.send_fds(self.sock, [_HEADER.pack(kind, len(data))], fds)
            self.sock.sendall(data)

    def receive(self) -> tuple[bytes, bytes, list[int]]:
        """The next message: kind, data, file descriptors. Raises EOFError when the other end has gone."""
        header, fds = b"", []
        while len(header) < _HEADER.size:
            try:
                part, more, _, _ = socket.recv_fds(self.sock, _HEADER.size - len(header), _MAX_FDS)
            except ConnectionResetError:
                part, more = b"", []
            if not part:
                raise EOFError
            header += part
            fds += more
        kind, length = _HEADER.unpack(header)
        return kind, self._exactly(length), fds

    def _exactly(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            try:
                part = self.sock.recv(min(count - len(parts), _PART))
            except ConnectionResetError:
                part = b""
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)

    def close(self) -> None:
        self.sock.close()


class Line:
    """The caller's end of a rank's socket. It never waits, so that a rank that stops amid a message holds up no one."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._out: deque[memoryview] = deque()
        self._in = bytearray()
        self._ended = False

    def fileno(self) -> int:
        return self.sock.fileno()

    @property
    def pending(self) -> bool:
        """Whether something posted has not gone out yet."""
        return bool(self._out)

    def post(self, kind: bytes, data: bytes = b"") -> None:
        self._out.extend((memoryview(_HEADER.pack(kind, len(data))), memoryview(data)))

    def flush(self) -> None:
        """Sends what the socket takes. A rank that has gone shows when receiving."""
        try:
            while self._out:
                part = self._out.popleft()
                if (sent := self.sock.send(part[:_PART])) < len(part):
                    self._out.appendleft(part[sent:])
        except BlockingIOError:
            self._out.appendleft(part)
        except (BrokenPipeError, ConnectionResetError):
            self._out.clear()

    def arrived(self) -> list[tuple[bytes, bytes]]:
        """The complete messages that are here. Raises EOFError when there is none and the rank has gone."""
        while not self._ended:
            try:
                part = self.sock.recv(_PART)
            except BlockingIOError:
                break
            except ConnectionResetError:
                part = b""
            self._ended = not part
            self._in += part
            if len(part) < _PART:
                break
        messages, at = [], 0
        while len(self._in) - at >= _HEADER.size:
            kind, length = _HEADER.unpack_from(self._in, at)
            end = at + _HEADER.size + length
            if len(self._in) < end:
                break
            messages.append((kind, bytes(memoryview(self._in)[at + _HEADER.size : end])))
            at = end
        del self._in[:at]
        if self._ended and not messages:
            raise EOFError
        return messages

    def close(self) -> None:
        self.sock.close()


class _Pickler(pickle.Pickler):
    """Plain tensors go as bytes on the CPU: only what they show of their storage, and without CUDA in the caller."""

    def reducer_override(self, obj: Any) -> Any:
        # torch is not imported here: a fork server is to start before the caller has spent seconds on that.
        if (torch := sys.modules.get("torch")) is None:
            return NotImplemented
        if type(obj) is not torch.Tensor or obj.layout != torch.strided or obj.is_quantized or obj.is_meta:
            return NotImplemented
        plain = obj.detach().cpu().resolve_conj().resolve_neg().contiguous()
        return _tensor, (plain.reshape(-1).view(torch.uint8).numpy(), obj.dtype, tuple(obj.shape))


def _tensor(data: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    import torch

    return torch.from_numpy(data).view(dtype).reshape(shape)


def dumps(message: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(message)
    return file.getvalue()


def loads(data: bytes) -> Any:
    return pickle.loads(data)  # noqa: S301  both ends are this user's own processes
