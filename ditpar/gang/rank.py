"""A rank: loads the pipeline, binds the plan, then serves the caller's commands until told to stop."""

from __future__ import annotations

import datetime
import faulthandler
import os
import pickle
import queue
import signal
import threading
import traceback
from typing import Any

import torch
import torch.distributed as dist

from ditpar.gang.calls import Answer, Command, Marker, Setup, States
from ditpar.gang.lora import checked_load
from ditpar.gang.wire import Wire

STACKS_SIGNAL = signal.SIGUSR1


def serve(number: int, threads: int, wire: Wire, stacks: int) -> None:
    """The life of a rank. Returns when the caller closes the wire or says so."""
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True, chain=False)
    torch.set_num_threads(threads)
    Rank(number, wire).run()


class Rank:
    """State of one rank's process."""

    def __init__(self, number: int, wire: Wire) -> None:
        self.number, self.wire = number, wire
        self.commands: queue.Queue[Any] = queue.Queue()
        self.replies: queue.Queue[Any] = queue.Queue()
        self.pipe: Any = None
        self.steps = 0
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        """Sorts what arrives, also while a request runs. The caller's end closing ends the process at once."""
        while True:
            try:
                kind, value = self.wire.receive()
            except EOFError:
                os._exit(0)
            if kind == "command":
                self.commands.put(value)
            elif kind == "reply":
                self.replies.put(value)
            elif kind == "interrupt" and self.pipe is not None:
                self.pipe._interrupt = True

    def run(self) -> None:
        while True:
            command = self.commands.get()
            if command is None:
                return
            try:
                answer = Answer(self._do(command))
            except Exception as error:  # noqa: BLE001  whatever a request raises is the caller's to see
                answer = Answer(error=_portable(error), traceback=traceback.format_exc())
            self.wire.send(("answer", answer))

    def _do(self, command: Setup | Command) -> Any:
        if isinstance(command, Setup):
            return self._set_up(command)
        os.chdir(command.folder)
        if command.only_rank is not None and command.only_rank != self.number:
            return None
        if command.plan is not None and str(self.pipe._ditpar.plan) != command.plan:
            self._bind(command.plan)
        target = self.pipe
        for name in command.path[:-1]:
            target = getattr(target, name)
        name = command.path[-1]
        if command.kind == "set":
            return setattr(target, name, command.args[0])
        if command.kind == "get":
            return self._described(getattr(target, name))
        if name == "__call__":
            return self._request(command)
        if name == "load_lora_weights":
            return checked_load(target, command.args, command.kwargs)
        result = getattr(target, name)(*command.args, **command.kwargs)
        return Marker.SELF if result is target else result if self.number == 0 else None

    def _set_up(self, setup: Setup) -> Any:
        import diffusers

        device = f"{setup.device}:{self.number}" if setup.device == "cuda" else setup.device
        if setup.world > 1:
            self._join(setup)
        if setup.device == "cuda":
            torch.cuda.set_device(self.number)
        if self.number > 0 or setup.quiet:  # one rank's bars are enough
            import transformers

            diffusers.utils.logging.disable_progress_bar()
            transformers.utils.logging.disable_progress_bar()
        self.pipe = diffusers.DiffusionPipeline.from_pretrained(setup.path, **setup.options)
        if setup.device != "cpu":
            self.pipe.to(device)
        self._bind(setup.plan)
        return self.pipe.scheduler if self.number == 0 else None

    def _bind(self, plan: str) -> None:
        from ditpar.engine.parallel import parallelize

        parallelize(self.pipe, plan)
        self.pipe._ditpar.on_step = self._step

    def _join(self, setup: Setup) -> None:
        """Enters the process group: rank 0 opens a store on a free port and the caller tells the others which."""
        timeout = datetime.timedelta(seconds=setup.timeout)
        if self.number == 0:
            store = dist.TCPStore("127.0.0.1", 0, setup.world, True, timeout, wait_for_workers=False)
            self.wire.send(("port", store.port))
        else:
            store = dist.TCPStore("127.0.0.1", self.replies.get(), setup.world, False, timeout)
        backend = "nccl" if setup.device == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=self.number, world_size=setup.world, timeout=timeout)

    def _step(self) -> None:
        self.steps += 1
        self.wire.send(("step", self.steps))

    def _request(self, command: Command) -> Any:
        self.steps = 0
        kwargs = dict(command.kwargs)
        states: States = kwargs.pop("generator")
        generators = states.restore()
        kwargs["generator"] = generators
        for name, value in kwargs.items():
            if value is Marker.CALLBACK:
                kwargs[name] = self._step_callback if name == "callback_on_step_end" else self._plain_callback
        result = self.pipe(**kwargs)
        return (result, States.of(generators)) if self.number == 0 else None

    def _step_callback(self, _: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        """The caller's `callback_on_step_end`: rank 0 asks, and the engine gives its edits to the other ranks."""
        if self.number > 0:
            return {}
        edited, interrupt = self._ask("callback_on_step_end", step, timestep, tensors)
        if interrupt:
            self.pipe._interrupt = True
        return edited

    def _plain_callback(self, step: int, timestep: Any, latents: torch.Tensor) -> None:
        """The caller's older `callback`, which may edit the latents in place."""
        world = self.pipe._ditpar.mesh.world
        edited = self._ask("callback", step, timestep, {"latents": latents})[0] if self.number == 0 else {}
        if world.max(len(edited)):
            latents.copy_(world.broadcast("control", edited.get("latents", latents).contiguous()))

    def _ask(self, name: str, step: int, timestep: Any, tensors: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        self.wire.send(("callback", (name, step, timestep, tensors)))
        return self.replies.get()

    @staticmethod
    def _described(value: Any) -> Any:
        if isinstance(value, torch.nn.Module):
            return Marker.MODULE
        if callable(value) and not isinstance(value, type):
            return Marker.METHOD
        return value


def _portable(error: Exception) -> Exception:
    """The error if it survives the wire, else a RuntimeError that says the same."""
    try:
        same = type(pickle.loads(pickle.dumps(error))) is type(error)  # noqa: S301
    except Exception:  # noqa: BLE001  a class that does not pickle can fail in any way
        same = False
    return error if same else RuntimeError(f"{type(error).__name__}: {error}")
