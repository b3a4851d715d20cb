"""Messages between the caller, the fork server and the ranks: pickles with a length before them, on Unix sockets."""

from __future__ import annotations

import io
import pickle
import socket
import struct
import sys
import threading
from typing import Any

_LENGTH = struct.Struct("<Q")


class Wire:
    """One end of a socket. `send` may be called from several threads; `receive` from one."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, message: Any) -> None:
        data = _dumps(message)
        with self._lock:
            self.sock.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> Any:
        """The next message. Raises EOFError when the other end has gone."""
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        return pickle.loads(self._exactly(length))  # noqa: S301  both ends are this user's own processes

    def _exactly(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            try:
                part = self.sock.recv(min(count - len(parts), 1 << 20))
            except ConnectionResetError:
                part = b""
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)

    def close(self) -> None:
        self.sock.close()


class _Pickler(pickle.Pickler):
    """Tensors go as they look, not with the whole storage behind them."""

    def reducer_override(self, obj: Any) -> Any:
        # Not imported here, so that a fork server is started before the caller has spent seconds on importing torch.
        torch = sys.modules.get("torch")
        if torch is None:
            return NotImplemented
        plain = type(obj) is torch.Tensor and obj.device.type == "cpu" and obj.layout == torch.strided
        if plain and obj.numel() * obj.element_size() < obj.untyped_storage().nbytes():
            return obj.detach().clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def _dumps(message: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(message)
    return file.getvalue()
