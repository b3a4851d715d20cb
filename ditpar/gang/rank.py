"""A rank: begins with its host's pipeline, binds the plan, then serves the caller's commands until told to stop."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import functools
import os
import queue
import select
import socket
import threading
import time
import traceback
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ditpar.engine.parallel import parallelize, transformer_names
from ditpar.engine.partial import staying
from ditpar.errors import RequestError
from ditpar.family import family_of
from ditpar.gang.calls import Answer, Command, Loading, Marker, Setup, facts
from ditpar.gang.lora import checked_load
from ditpar.gang.request import Request
from ditpar.gang.server import STACKS_SIGNAL
from ditpar.gang.wire import Wire, dumps, loads
from ditpar.plan import Plan

BEAT_S = 1.0
_FOREVER = datetime.timedelta(days=7)
"""Of collectives. The caller watches over the ranks, and knows when they wait for a callback of its own."""


def serve(number: int, wire: Wire, stacks: int, pipe: Any) -> None:
    """The life of a rank. Ends the process when the caller's end of the wire closes.

    Args:
        stacks: descriptor of a file that all threads' stacks are written to on a fault or `STACKS_SIGNAL`.
        pipe: the pipeline, or a function that loads it.
    """
    faulthandler.enable(stacks)
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True, chain=False)
    try:
        Rank(number, wire, pipe).run()
    except BaseException:
        os.write(stacks, traceback.format_exc().encode())
        raise


def loader(loading: Loading) -> Callable[[], Any]:
    """A function that loads the pipeline as `loading` says."""
    import diffusers
    import transformers
    from tqdm import tqdm

    tqdm.monitor_interval = 0  # its thread would not survive the fork
    if not loading.show_bars:
        diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    return lambda: diffusers.DiffusionPipeline.from_pretrained(loading.path, **loading.options)


class Rank:
    """State of one rank's process. The main thread does what the caller says; another one reads, and shows life."""

    def __init__(self, number: int, wire: Wire, pipe: Any) -> None:
        self.number, self.wire, self.pipe = number, wire, pipe
        self.commands: queue.Queue[bytes] = queue.Queue()
        self.replies: queue.Queue[tuple[bytes, bytes]] = queue.Queue()
        self.request: Request | None = None
        self.device = "cpu"
        self._traces = False
        self._busy = False
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        """Sorts what arrives, also while a request runs; the rest of the time sends signs of life.

        The caller's end closing ends the process at once. Nothing is unpickled here: that may fail.
        """
        due = 0.0
        with contextlib.suppress(EOFError, OSError):
            while True:
                if select.select([self.wire], [], [], BEAT_S / 2)[0]:
                    kind, data, _ = self.wire.receive()
                    if kind == b"c":
                        self._busy = True
                        self.commands.put(data)
                    elif kind == b"i":
                        self.pipe._interrupt = True
                    else:
                        self.replies.put((kind, data))
                if self._busy and time.monotonic() >= due:
                    due = time.monotonic() + BEAT_S
                    self.wire.send(b"b", dumps(self.request.steps if self.request else 0))
        os._exit(0)

    def run(self) -> None:
        while True:
            data = self.commands.get()
            answer = self.answer(data)
            self._busy = False
            self.wire.send(b"a", answer)

    def answer(self, data: bytes) -> bytes:
        """Does a pickled command; the pickled Answer."""
        try:
            return self._sendable(self._do(loads(data)))
        except Exception as error:  # noqa: BLE001  whatever a request raises is the caller's to see
            return dumps(Answer(error=portable(error), traceback=traceback.format_exc()))

    def _sendable(self, value: Any) -> bytes:
        value = self._described(value) if self.number == 0 else None  # only rank 0's is looked at
        try:
            return dumps(Answer(value))
        except Exception as error:  # noqa: BLE001  objects that do not pickle can fail in any way
            return dumps(Answer(f"{type(value).__name__} ({error})", sendable=False))

    def _do(self, command: Setup | Command) -> Any:
        if isinstance(command, Setup):
            return self._set_up(command)
        os.chdir(command.folder)
        if command.only_rank not in (None, self.number):
            return None
        if command.plan is not None and (
            str(self.pipe._ditpar.plan) != command.plan or self.pipe._ditpar.mesh.health.broken
        ):
            self._bind(command.plan)
        if command.path == ("__call__",):
            return self._call(command)
        target = functools.reduce(getattr, command.path[:-1], self.pipe)
        name = command.path[-1]
        if command.kind == "set":
            return setattr(target, name, command.args[0])
        if command.kind == "get":
            return getattr(target, name)
        if name == "load_lora_weights":
            return checked_load(target, command.args, command.kwargs)
        result = getattr(target, name)(*command.args, **command.kwargs)
        return Marker.SELF if result is target else result

    def _set_up(self, setup: Setup) -> Any:
        torch.set_num_threads(setup.threads)
        self.device = f"cuda:{self.number}" if setup.device == "cuda" else setup.device
        if setup.device == "cuda":
            torch.cuda.set_device(self.number)
        if setup.world > 1:
            self._join(setup)
        if isinstance(self.pipe, types.FunctionType):
            self.pipe = self.pipe()
        if setup.device != "cpu":
            self._to_device(Plan.parse(setup.plan))
        self._traces = setup.traces
        self._bind(setup.plan)
        modules = [name for name, value in self.pipe.components.items() if isinstance(value, torch.nn.Module)]
        return self.pipe.scheduler, facts(self.pipe) | {"_internal_dict": self.pipe.config}, modules

    def _to_device(self, plan: Plan) -> None:
        """Moves what this rank computes with; other stages' blocks stay in memory that the host's ranks share."""
        with contextlib.ExitStack() as stack:
            for name in transformer_names(self.pipe) if plan.pipe > 1 else ():
                model = getattr(self.pipe, name)
                stack.enter_context(staying(family_of(type(model).__name__), model, plan, self.number))
            self.pipe.to(self.device)

    def _bind(self, plan: str) -> None:
        parallelize(self.pipe, plan)
        self.pipe._ditpar.traces = self._traces
        self.pipe.progress_bar = self._progress_bar

    def _progress_bar(self, iterable: Any = None, total: int | None = None) -> Any:
        """In the place of the pipeline's own: the bar is drawn by the caller."""
        assert self.request is not None
        return self.request.progress_bar(iterable, total)

    def _join(self, setup: Setup) -> None:
        """Enters the process group: rank 0 opens a store on a free port and the caller tells the others which."""
        if setup.device == "cpu" and "lo" in {name for _, name in socket.if_nameindex()}:
            # gloo would look the host's name up, which need not lead to an address that works
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if self.number == 0:
            store = dist.TCPStore("127.0.0.1", 0, setup.world, True, _FOREVER, wait_for_workers=False)
            self.wire.send(b"p", dumps(store.port))
        else:
            store = dist.TCPStore("127.0.0.1", loads(self.replies.get()[1]), setup.world, False, _FOREVER)
        backend = "nccl" if setup.device == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=self.number, world_size=setup.world, timeout=_FOREVER)

    def _call(self, command: Command) -> Any:
        if self.request is not None:
            raise RequestError("a callback cannot start another request on the pipeline that called it")
        self.request = Request(self, command.kwargs)
        try:
            return self.request.run()
        finally:
            self.request = None

    @staticmethod
    def _described(value: Any) -> Any:
        if isinstance(value, torch.nn.Module):
            return Marker.MODULE
        if isinstance(value, types.MethodType | types.FunctionType | types.BuiltinFunctionType | functools.partial):
            return Marker.METHOD
        return value


def portable(error: Exception) -> Exception:
    """The error if it survives the wire, else a RuntimeError that says the same."""
    with contextlib.suppress(Exception):  # a class that does not pickle can fail in any way
        if type(loads(dumps(error))) is type(error):
            return error
    return RuntimeError(f"{type(error).__name__}: {error}")
