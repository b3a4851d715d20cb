"""The drop-in: an object in the caller's process that is used like the diffusers pipeline which its gang holds."""

from __future__ import annotations

import inspect
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ditpar.errors import GangError, RequestError
from ditpar.gang.calls import Command, Marker, Setup, States
from ditpar.gang.local import LocalGang
from ditpar.gang.modelfolder import Model
from ditpar.plan import Plan, auto

_CALLBACKS = ("callback_on_step_end", "callback")
_ON_RANK_0 = ("save_pretrained", "save_lora_weights")
_OWN = (
    "_gang",
    "_setup",
    "_model",
    "_stock",
    "_plan",
    "_lock",
    "_scheduler",
    "_history",
    "_finalizer",
    "_owner",
    "_wish",
)


class RemotePipeline:
    """A diffusers pipeline whose ranks are other processes. Made by `ditpar.load`; has the stock class' `__call__`.

    Methods and settings of the stock pipeline are forwarded to all ranks, and done again when a gang has to be started
    anew after a fault. Also a context manager. Threads are served in turn.
    """

    def __init__(self, gang: LocalGang, setup: Setup, model: Model, stock: type, plan: Plan | None) -> None:
        state: dict[str, Any] = {
            "_gang": gang,
            "_setup": setup,
            "_model": model,
            "_stock": stock,
            "_plan": plan,
            "_lock": threading.RLock(),
            "_scheduler": None,
            "_history": [],
            "_finalizer": weakref.finalize(self, gang.close),
            "_owner": None,
            "_wish": False,
        }
        vars(self).update(state)
        self._start()

    # -- the pipeline call ---------------------------------------------------------------------------------------------

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(self._stock.__call__).bind(self, *args, **kwargs)
        given = dict(bound.arguments)
        given.pop(next(iter(given)))
        call = self._with_defaults(given)
        generator = call.get("generator")
        if isinstance(generator, int):
            generator = torch.Generator().manual_seed(generator)
        callbacks = {name: call[name] for name in _CALLBACKS if call.get(name) is not None}
        tensor_inputs = getattr(callbacks.get("callback_on_step_end"), "tensor_inputs", None)
        if tensor_inputs is not None:
            call["callback_on_step_end_tensor_inputs"] = list(tensor_inputs)
        sent = {**call, **dict.fromkeys(callbacks, Marker.CALLBACK), "generator": States.of(generator)}
        with self._turn():
            object.__setattr__(self, "_wish", False)
            command = self._command("call", ("__call__",), kwargs=sent, plan=self._plan_for(call))
            result, states = self._gang.run(command, lambda *event: self._called_back(callbacks, *event))
        states.hand_back(generator)
        return result

    def _with_defaults(self, given: dict[str, Any]) -> dict[str, Any]:
        """The call with the model's defaults for what was not given and what the pipeline takes."""
        parameters = inspect.signature(self._stock.__call__).parameters
        embedded = any(given.get(name) is not None for name in ("prompt_embeds", "negative_prompt_embeds"))
        filled = {
            name: value
            for name, value in self._model.defaults.items()
            if name in parameters and not (embedded and name == "negative_prompt")
        }
        return {**filled, **given}

    def _plan_for(self, call: dict[str, Any]) -> str:
        """The plan of this call: the one that was loaded, or under `auto` what suits the call."""
        parameters = inspect.signature(self._stock.__call__).parameters.values()
        full = {p.name: p.default for p in parameters if p.default is not p.empty} | call
        family, config, world = self._model.family, self._model.config, self._setup.world
        plan = self._plan or auto(family, config, full, world)
        plan.validate(family, config, full, world)
        return str(plan)

    def _called_back(
        self, callbacks: dict[str, Any], name: str, step: int, timestep: Any, tensors: dict[str, Any]
    ) -> Any:
        """Runs the caller's callback here; returns what it edited, and whether it wants to stop."""
        before = {key: (value, _version(value)) for key, value in tensors.items()}
        if name == "callback":
            callbacks[name](step, timestep, tensors["latents"])
            result: dict[str, Any] = {}
        else:
            result = callbacks[name](self, step, timestep, tensors) or {}
        after = {**tensors, **result}
        kept = {k for k, (v, version) in before.items() if after[k] is v and _version(v) == version}
        return {k: v for k, v in after.items() if k not in kept}, self._wish

    # -- everything else that a pipeline can do ------------------------------------------------------------------------

    @property
    def scheduler(self) -> Any:
        """The scheduler, as the ranks have it; assign another one to swap it."""
        return self._scheduler

    @property
    def interrupt(self) -> bool:
        return self._wish

    @property
    def plan(self) -> Plan | None:
        """The plan that was loaded; None when each call gets its own (`auto`)."""
        return self._plan

    def memory(self) -> list[dict[str, int]]:
        """Resident memory of each rank, in bytes."""
        return self._gang.memory()

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Accepts the device that the ranks use already; refuses others, which `load` decides."""
        wanted = [a for a in (*args, *kwargs.values()) if isinstance(a, str | torch.device)]
        if len(wanted) != 1 or len(args) + len(kwargs) != 1 or torch.device(wanted[0]).type != self._setup.device:
            raise RequestError(
                f"to{args}: the ranks hold the pipeline on {self._setup.device}; choose dtype by load(..., torch_dtype=...)"
            )
        return self

    def close(self) -> None:
        """Ends the gang. The object cannot be used afterwards."""
        self._finalizer()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{self._stock.__name__} on {self._setup.world} ranks, plan {self._plan or 'auto'}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in _OWN:
            raise AttributeError(name)
        return self._remote((name,), getattr(self._stock, name, None))

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_interrupt":
            object.__setattr__(self, "_wish", bool(value))
            if value and self._owner != threading.get_ident():
                self._gang.interrupt()
        elif name == "scheduler":
            self._lasting(self._command("set", ("scheduler",), (value,)))
            object.__setattr__(self, "_scheduler", value)
        else:
            raise AttributeError(
                f"{name} cannot be set on a pipeline that lives in other processes; load it with the value"
            )

    def _remote(self, path: tuple[str, ...], stock: Any = None) -> Any:
        """What stands at `path` below the pipeline: a value, or a stand-in for a method or module there."""
        if inspect.isfunction(stock):
            found: Any = Marker.METHOD
        else:
            with self._turn():
                found = self._gang.run(self._command("get", path))
        if found is Marker.METHOD:
            return self._method(path)
        return RemoteModule(self, path) if found is Marker.MODULE else found

    def _method(self, path: tuple[str, ...]) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            rank = 0 if path[-1] in _ON_RANK_0 else None
            command = self._command("call", path, args, kwargs, only_rank=rank)
            result = self._lasting(command) if rank is None else self._now(command)
            return self if result is Marker.SELF else result

        method.__name__ = path[-1]
        return method

    # -- the gang ------------------------------------------------------------------------------------------------------

    def _command(
        self, kind: str, path: tuple[str, ...], args: tuple[Any, ...] = (), kwargs: Any = None, **more: Any
    ) -> Command:
        return Command(kind, path, args, kwargs or {}, os.getcwd(), **more)

    def _now(self, command: Command) -> Any:
        with self._turn():
            return self._gang.run(command)

    def _lasting(self, command: Command) -> Any:
        """Runs a command that changes the pipeline, and remembers it for a gang started anew."""
        with self._turn():
            result = self._gang.run(command)
            self._history.append(command)
            return result

    def _start(self) -> None:
        try:
            scheduler = self._gang.run(self._setup)
            for command in self._history:
                self._gang.run(command)
        except BaseException:
            self._gang.end()  # ranks that are half set up would serve the next command
            raise
        if self._scheduler is None:
            object.__setattr__(self, "_scheduler", scheduler)

    def _turn(self) -> _Turn:
        return _Turn(self)


class _Turn:
    """One thread's turn with the gang, which is started anew if a fault has ended it."""

    def __init__(self, pipe: RemotePipeline) -> None:
        self.pipe = pipe

    def __enter__(self) -> None:
        pipe = self.pipe
        if not pipe._finalizer.alive:
            raise GangError("the pipeline is closed")
        if pipe._owner == threading.get_ident():
            raise RequestError("the pipeline is in the middle of this thread's own request; a callback cannot use it")
        pipe._lock.acquire()
        vars(pipe)["_owner"] = threading.get_ident()
        try:
            if not pipe._gang.alive:
                pipe._start()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: Any) -> None:
        vars(self.pipe)["_owner"] = None
        self.pipe._lock.release()


class RemoteModule:
    """A component that lives in the ranks. Its methods run there, on all ranks; its values are fetched from rank 0."""

    def __init__(self, pipe: RemotePipeline, path: tuple[str, ...]) -> None:
        self._pipe, self._path = pipe, path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._pipe._remote((*self._path, name))

    def __repr__(self) -> str:
        return f"<{'.'.join(self._path)} in the ranks of {self._pipe!r}>"


def _version(value: Any) -> int:
    return value._version if isinstance(value, torch.Tensor) else 0


def remote_class(stock: type) -> type[RemotePipeline]:
    """RemotePipeline with the name, signature and documentation of a stock pipeline class."""

    def __call__(self: RemotePipeline, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    __call__.__signature__ = inspect.signature(stock.__call__)  # type: ignore[attr-defined]
    __call__.__doc__ = stock.__call__.__doc__
    return type(stock.__name__, (RemotePipeline,), {"__call__": __call__, "__doc__": stock.__doc__})
