"""Two network namespaces of this host, joined by one link whose rate can be limited. Linux, as root, with `ip` and `tc`."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from types import TracebackType

DEVICE = "veth0"
"""The link's end, in both namespaces."""
CONGESTION = "reno"
"""Part of every kernel; on a link that drops nothing it never slows down."""
_CLONE_NEWNET = 0x40000000


class NetlinkError(RuntimeError):
    """The namespaces cannot be made here; the message says why."""


class NetLink:
    """The namespaces and the link between them, from `with` to its end.

    Attributes:
        names: of the namespaces.
    """

    def __init__(self) -> None:
        if not sys.platform.startswith("linux"):
            raise NetlinkError("network namespaces need Linux")
        if os.geteuid() != 0:
            raise NetlinkError("network namespaces need root: run it with sudo")
        if missing := [name for name in ("ip", "tc") if shutil.which(name) is None]:
            raise NetlinkError(f"no {' and no '.join(missing)} on this machine: install iproute2")
        self.names = [f"ditpar-{os.getpid()}-{end}" for end in "ab"]

    def __enter__(self) -> NetLink:
        try:
            for name in self.names:
                _do("ip", "netns", "add", name)
            ours, theirs = self.names
            _do(*f"ip link add {DEVICE} netns {ours} type veth peer name {DEVICE} netns {theirs}".split())
            for i, name in enumerate(self.names):
                _do(*f"ip -n {name} addr add 10.77.0.{i + 1}/30 dev {DEVICE}".split())
                _do(*f"ip -n {name} link set lo up".split())
                _do(*f"ip -n {name} link set {DEVICE} up".split())
        except BaseException:
            self._remove()
            raise
        return self

    def limit(self, bits: float | None) -> None:
        """Limits each direction to some bits a second; None takes the limit away.

        The bucket holds what a millisecond carries: a larger one would give messages after a pause a head start. The
        queue is larger than what a sender has on its way, so nothing is dropped.
        """
        for name in self.names:
            if bits is None:
                subprocess.run(f"tc -n {name} qdisc del dev {DEVICE} root".split(), capture_output=True, check=False)
                continue
            burst = max(int(bits / 8 * 1e-3), 4000)
            shape = f"tbf rate {int(bits)}bit burst {burst} limit {16 << 20}"
            _do(*f"tc -n {name} qdisc replace dev {DEVICE} root {shape}".split())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        """Namespaces take their end of the link and its limit along, once no process is in them."""
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def enter(name: str) -> None:
    """Moves this thread, and those that it starts, into a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {name}")
    for setting, value in (("tcp_congestion_control", CONGESTION), ("tcp_slow_start_after_idle", "0")):
        with open(f"/proc/sys/net/ipv4/{setting}", "w") as file:
            file.write(value)


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NetlinkError(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
