"""The drop-in: an object in the caller's process that is used like the diffusers pipeline which its gang holds."""

from __future__ import annotations

import inspect
import logging
import os
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from diffusers import DiffusionPipeline

from ditpar.errors import GangError, RequestError
from ditpar.gang.bar import Bar
from ditpar.gang.calls import Command, Event, Marker, Reply, Setup, States, generators
from ditpar.gang.component import RemoteModule
from ditpar.gang.gang import Gang, Listener
from ditpar.gang.history import History, lasts
from ditpar.gang.modelfolder import Model
from ditpar.gang.scheduler import SchedulerCopy
from ditpar.gang.wire import dumps
from ditpar.plan import Plan, auto

logger = logging.getLogger("ditpar")

_ON_RANK_0 = ("save_pretrained", "save_lora_weights", "push_to_hub")
_REFUSED = ("enable_model_cpu_offload", "enable_sequential_cpu_offload", "enable_group_offload")
_FIXED = ("transformer", "transformer_2")


class RemotePipeline:
    """A diffusers pipeline whose ranks are other processes. Made by `ditpar.load`; has the stock class' `__call__`.

    Methods and settings are forwarded to all ranks, and done again when a gang has to be started anew after a fault.
    Plain attributes are answered here. Also a context manager. Threads are served in turn. A callback may use the pipeline
    as it may use a stock one: read it, set it, decode with its VAE.
    """

    _gang: Gang
    events: list[list[Event]]
    """What each rank did in the last call, when loaded with `trace`."""

    def __init__(self, gang: Gang, setup: Setup, model: Model, stock: type, plan: Plan | None) -> None:
        vars(self).update(
            _gang=gang,
            _setup=setup,
            _model=model,
            _stock=stock,
            _plan=plan,
            _signature=inspect.signature(stock.__call__),
            _lock=threading.Lock(),
            _owner=None,  # the thread whose turn it is
            _settings=None,  # what a running callback has set
            _raised=None,  # what a callback has raised
            _facts={},
            events=[],
            _modules=frozenset(),
            _history=History(),
            _schedule=None,
            _finalizer=weakref.finalize(self, gang.close),
            _progress_bar_config={},
        )
        self._start()

    # -- the pipeline call ---------------------------------------------------------------------------------------------

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        given = dict(self._signature.bind(self, *args, **kwargs).arguments)
        given.pop(next(iter(given)))
        given.update(given.pop("kwargs", {}) if "kwargs" in self._signature.parameters else {})
        call = self._with_defaults(given)
        generator = call["generator"] = generators(call.get("generator"))
        callbacks = {name: value for name, value in call.items() if name.startswith("callback") and callable(value)}
        tensor_inputs = getattr(callbacks.get("callback_on_step_end"), "tensor_inputs", None)
        if tensor_inputs is not None:  # a PipelineCallback says itself what it wants to see
            call["callback_on_step_end_tensor_inputs"] = list(tensor_inputs)
        with self._turn():
            plan = self._plan_for(call)
            self._send_scheduler()
            sent = {
                **call,
                **dict.fromkeys(callbacks, Marker.CALLBACK),
                "generator": States.of(generator, self._setup.device),
            }
            bar = Bar(self.progress_bar)
            listener = Listener(lambda event: self._called_back(callbacks, generator, event), bar.told)
            try:
                output, states, facts, events = self._gang.run(
                    self._command("call", ("__call__",), kwargs=sent, plan=plan), listener
                )
            except Exception:
                if self._raised is not None and self._gang.alive:
                    raise self._raised from None
                raise
            finally:
                vars(self)["_raised"] = None
                bar.close()
            states.set(generator)
            self._facts.update(facts)
            vars(self)["events"] = events
            self._schedule.outdated = True
        return output

    def _with_defaults(self, given: dict[str, Any]) -> dict[str, Any]:
        """The call with the model's defaults for what was not given and what the pipeline takes."""
        filled = {
            name: value
            for name, value in self._model.defaults.items()
            if name in self._signature.parameters and given.get(f"{name}_embeds") is None
        }
        if given.get("prompt_embeds") is not None:
            filled.pop("negative_prompt", None)
        return {**filled, **given}

    def _plan_for(self, call: dict[str, Any]) -> str:
        """The plan of this call: the one that was loaded, or under `auto` what suits the call."""
        parameters = self._signature.parameters.values()
        full = {p.name: p.default for p in parameters if p.default is not p.empty} | call
        family, config, world = self._model.family, self._model.config, self._setup.world
        plan = self._plan or auto(family, config, full, world)
        plan.validate(family, config, full, world)
        return str(plan)

    def _called_back(self, callbacks: dict[str, Any], generator: Any, event: Event) -> Reply:
        """Runs the caller's callback, here and in its thread, and gathers all that it did."""
        event.states.set(generator)
        self._facts.update(event.facts)
        self._schedule.outdated = True
        tensors = event.args[-1] if isinstance(event.args[-1], dict) else dict(enumerate(event.args))
        before = {place: value._version for place, value in tensors.items() if isinstance(value, torch.Tensor)}
        given = dict(tensors)
        vars(self)["_settings"] = {}
        result, raised = None, False
        try:
            result = callbacks[event.name](*((self,) if event.with_pipe else ()), *event.args)
        except Exception as error:
            if not self._gang.alive:  # it used the pipeline, and that ended the gang
                raise
            vars(self)["_raised"], raised = error, True
        finally:
            settings = vars(self)["_settings"]
            vars(self)["_settings"] = None
        edits = {place: given[place] for place, version in before.items() if given[place]._version != version}
        if isinstance(result, dict):  # what comes back as it went need not travel
            result = {k: v for k, v in result.items() if not (isinstance(v, torch.Tensor) and v is given.get(k))}
        reply = Reply(result, edits, settings, States.of(generator, self._setup.device), raised)
        try:
            dumps(reply)
        except Exception as error:  # noqa: BLE001  objects that do not pickle can fail in any way
            vars(self)["_raised"] = RequestError(f"{event.name} returned what cannot be sent to the ranks: {error}")
            reply = Reply(None, {}, {}, reply.states, True)
        return reply

    # -- what is answered here -----------------------------------------------------------------------------------------

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The stock class, so that `isinstance` holds."""
        return self._stock

    @property
    def plan(self) -> Plan | None:
        """The plan that was loaded; None when each call gets its own (`auto`)."""
        return self._plan

    @property
    def scheduler(self) -> Any:
        """The scheduler as the ranks have it. Change it or assign another one: the next call uses it."""
        if self._schedule.outdated and (self._in_callback or not self._lock.locked()):
            vars(self._schedule.object).update(vars(self._run("get", ("scheduler",))))
            self._schedule.remember()
        return self._schedule.object

    @property
    def components(self) -> dict[str, Any]:
        """The pipeline's components by name; modules as stand-ins for those in the ranks."""
        return {name: getattr(self, name) for name in sorted(self._model.components)}

    def memory(self) -> list[dict[str, int]]:
        """Memory of each rank in bytes: `rss`, resident; `pss`, with what ranks share counted in parts."""
        with self._turn():
            return self._gang.launcher.memory()

    def set_progress_bar_config(self, **kwargs: Any) -> None:
        """Options of the progress bar (tqdm), which this process draws."""
        vars(self)["_progress_bar_config"] = kwargs

    def progress_bar(self, iterable: Any = None, total: int | None = None) -> Any:
        """The stock pipeline's progress bar."""
        return DiffusionPipeline.progress_bar(self, iterable, total)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Accepts the device that the ranks use already; refuses others, and other dtypes, which `load` decides."""
        for wanted in (*args, *kwargs.values()):
            fits = wanted == self.dtype if isinstance(wanted, torch.dtype) else wanted in (None, True, False)
            if isinstance(wanted, str | torch.device):
                fits = torch.device(wanted).type == self._setup.device
            if not fits:
                raise RequestError(
                    f"to({wanted}): the ranks hold the pipeline in {self.dtype} on {self._setup.device}; "
                    "choose by ditpar.load(..., torch_dtype=..., device=...)"
                )
        return self

    def close(self) -> None:
        """Ends the gang. The object cannot be used afterwards."""
        self._finalizer()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{self._stock.__name__} on {self._setup.world} ranks, plan {self._plan or 'auto'}>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a pipeline that lives in other processes can neither be copied nor pickled")

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self._stock), *self._facts, *self._model.components})

    # -- what the ranks answer -----------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_facts" not in vars(self):
            raise AttributeError(name)
        if name in self._facts:
            return self._facts[name]
        if name in self._modules:
            return RemoteModule(self, (name,))
        if name in _REFUSED:
            raise RequestError(f"{name}: ranks keep their weights on their device; leave it out")
        stock = inspect.getattr_static(self._stock, name, None)
        if isinstance(stock, property):
            try:
                return stock.__get__(self)
            except AttributeError:  # it reads what only the ranks have
                return self._fetched((name,))
        if isinstance(stock, staticmethod | classmethod):
            return getattr(self._stock, name)
        if callable(stock):
            return self._method((name,), stock)
        return self._fetched((name,)) if stock is None else stock

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self) or name == "scheduler":
            if name not in ("scheduler", "_progress_bar_config"):
                raise AttributeError(f"{name} is ditpar's own")
            if name == "scheduler":
                self._schedule.object = value
            else:
                vars(self)[name] = value
        elif name in _FIXED or not (name in self._facts or name in self._model.components or name.startswith("_")):
            raise AttributeError(
                f"{name} cannot be set on a pipeline that lives in other processes; load it with the value"
            )
        elif self._in_callback:
            self._facts[name] = self._settings[name] = value
        elif name == "_interrupt" and self._lock.locked():
            self._facts[name] = value
            if value:
                self._gang.interrupt()
        else:
            self._run("set", (name,), value)
            if name in self._facts:
                self._facts[name] = value
            vars(self)["_modules"] -= {name}

    def _fetched(self, path: tuple[str, ...]) -> Any:
        """What stands at `path` below the pipeline: a value, or a stand-in for a method or module there."""
        found = self._run("get", path)
        if found is Marker.METHOD:
            return self._method(path)
        return RemoteModule(self, path) if found is Marker.MODULE else found

    def _method(self, path: tuple[str, ...], stock: Any = None) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            result = self._run("call", path, *args, **kwargs)
            if result is Marker.MODULE:
                return RemoteModule(self, path)
            return (self if len(path) == 1 else RemoteModule(self, path[:-1])) if result is Marker.SELF else result

        method.__name__ = path[-1]
        if inspect.isfunction(stock):
            method.__doc__ = stock.__doc__
            method.__signature__ = inspect.signature(stock.__get__(self))  # type: ignore[attr-defined]
        return method

    def _run(self, kind: str, path: tuple[str, ...], *args: Any, **kwargs: Any) -> Any:
        """A command on all ranks; remembered for a gang started anew if it changes the pipeline."""
        only_rank = 0 if path[-1] in _ON_RANK_0 else None
        command = self._command(kind, path, args, kwargs, only_rank=only_rank)
        if self._in_callback:
            result = self._gang.run_within(command)
        else:
            with self._turn():
                if kind == "call":
                    self._send_scheduler()
                result = self._gang.run(command)
        if lasts(command):
            self._history.add(command)
        return result

    def _command(
        self, kind: str, path: tuple[str, ...], args: tuple[Any, ...] = (), kwargs: Any = None, **more: Any
    ) -> Command:
        return Command(kind, path, args, kwargs or {}, os.getcwd(), **more)

    # -- the gang ------------------------------------------------------------------------------------------------------

    @property
    def _in_callback(self) -> bool:
        return self._settings is not None and self._owner == threading.get_ident()

    def _start(self) -> None:
        """Starts the ranks, and does again what had been done to those before."""
        try:
            scheduler, facts, modules = self._gang.start(self._setup)
            for command in self._history:
                self._again(command)
        except BaseException:
            self._gang.end()  # ranks that are half set up would serve the next command
            raise
        self._facts.update(facts)
        vars(self)["_modules"] = frozenset(modules)
        if self._schedule is None:
            vars(self)["_schedule"] = SchedulerCopy(scheduler)
        self._schedule.sent = b""

    def _again(self, command: Command) -> None:
        try:
            self._gang.run(command)
        except Exception as error:
            what = f"pipe.{'.'.join(command.path)}"
            raise GangError(f"the gang was started anew, but {what} could not be done again: {error}") from error

    def _send_scheduler(self) -> None:
        if (data := self._schedule.changed()) is not None:
            self._gang.run(self._command("set", ("scheduler",), (self._schedule.object,)))
            self._schedule.sent = data

    def _turn(self) -> _Turn:
        return _Turn(self)


class _Turn:
    """One thread's turn with the gang, which is started anew if a fault has ended it."""

    def __init__(self, pipe: RemotePipeline) -> None:
        self.pipe = pipe

    def __enter__(self) -> None:
        pipe = self.pipe
        if pipe._owner == threading.get_ident():
            raise RequestError("a callback cannot start another request on the pipeline that called it")
        pipe._lock.acquire()
        vars(pipe)["_owner"] = threading.get_ident()
        try:
            if not pipe._finalizer.alive:
                raise GangError("the pipeline is closed")
            if ailing := pipe._gang.ailing():
                logger.warning("%s while idle; the gang is started anew", ailing)
                pipe._gang.end()
            if not pipe._gang.alive:
                pipe._start()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: Any) -> None:
        vars(self.pipe)["_owner"] = None
        self.pipe._lock.release()


def remote_class(stock: type) -> type[RemotePipeline]:
    """RemotePipeline with the name, signature and documentation of a stock pipeline class."""

    def __call__(self: RemotePipeline, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    __call__.__signature__ = inspect.signature(stock.__call__)  # type: ignore[attr-defined]
    __call__.__doc__ = stock.__call__.__doc__
    body = {
        "__call__": __call__,
        "__doc__": stock.__doc__,
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
    }
    return type(stock.__name__, (RemotePipeline,), body)
