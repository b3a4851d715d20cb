"""parallelize(): a plan bound to a pipeline instance, which stays the same object and can be given back."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn

from ditpar.dataflow.deferred import resolve
from ditpar.engine.agree import (
    Interrupts,
    agree_on_arguments,
    agree_on_random_state,
    agreed_callback,
    plain_callback,
    watching_callback,
)
from ditpar.engine.bind import Binding
from ditpar.engine.components import drop_weights, fetch_weights, once_modules, share_components
from ditpar.engine.partial import complete
from ditpar.engine.undo import Changes
from ditpar.errors import ModelError, PlanError, RequestError
from ditpar.family import Family, family_of
from ditpar.mesh import Mesh, build_mesh
from ditpar.methods.calls import Calls
from ditpar.plan import Plan, auto
from ditpar.trace import Event, Trace

_TRANSFORMERS = ("transformer", "transformer_2")


class Engine:
    """A plan bound to one pipeline instance.

    Attributes:
        plan, family, mesh: what was bound.
        calls: the transformer calls that wait for one another, under a plan with cfg or pipe.
        serves: the thread whose request is running.
        traces: whether requests are to be traced; `events` then has those of all ranks, of the last request.
    """

    def __init__(self, pipe: Any, plan: Plan, family: Family, stock: type) -> None:
        self.plan, self.family, self.stock = plan, family, stock
        self.mesh: Mesh = build_mesh(plan, _device(pipe))
        self.bindings = {
            name: Binding(name, family, self.mesh, _unwrapped(getattr(pipe, name))) for name in transformer_names(pipe)
        }
        self.calls = Calls(family, self.mesh) if plan.cfg > 1 or plan.pipe > 1 else None
        self.busy = threading.Lock()
        self.serves: int | None = None
        self.traces = False
        self.events: list[list[Event]] = []
        self.interrupts = Interrupts(self.mesh.world, 0)

    @property
    def forced(self) -> Mapping[tuple[str, str], int]:
        """Of the last request: operations that made pending calls run, by name and line of code, and how often."""
        return self.calls.forced if self.calls else {}

    @property
    def rank(self) -> int:
        return self.mesh.world.index

    def request(self, pipe: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One pipeline call: checked, agreed on, run by stock code on bound instances, and unbound again."""
        if not self.busy.acquire(blocking=False):
            raise RequestError(
                "this pipeline is already serving a request; ditpar.load() serves several threads in turn"
            )
        if self.mesh.health.broken:
            self.busy.release()
            raise RequestError(
                "a request failed inside a transformer call, and messages of it are still on their way between the stages; "
                "call ditpar.parallelize again"
            )
        changes = Changes()
        self.serves = threading.get_ident()
        try:
            bound = inspect.signature(self.stock.__call__).bind(pipe, *args, **kwargs)
            bound.apply_defaults()
            call = dict(bound.arguments)
            self_name = next(iter(call))
            del call[self_name]
            self._check(pipe, call)
            world = self.mesh.world
            if world.size > 1:
                agree_on_arguments(world, call)
                agree_on_random_state(world, call.get("generator"))
                callback, watches = call.get("callback_on_step_end"), False
                if callback is not None:
                    # Stock code asks a PipelineCallback object for its tensors, and so must we, since we wrap it.
                    if hasattr(callback, "tensor_inputs"):
                        bound.arguments["callback_on_step_end_tensor_inputs"] = callback.tensor_inputs
                    inputs = bound.arguments.get("callback_on_step_end_tensor_inputs")
                    watches = self.plan.pipe > 1 and inputs is not None and len(inputs) == 0
                    wrap = watching_callback if watches else partial(agreed_callback, world)
                    bound.arguments["callback_on_step_end"] = wrap(callback)
                if call.get("callback") is not None:
                    bound.arguments["callback"] = plain_callback(call["callback"])
                # Callbacks make ranks meet at each step in any case. Else a stage pipeline is never drained.
                self.interrupts = Interrupts(world, 2 if self.plan.pipe > 1 and (callback is None or watches) else 0)
            with self._traced(), self.calls.request() if self.calls else nullcontext():
                self._apply(changes, pipe)
                result = resolve(self.stock.__call__(*bound.args, **bound.kwargs))
            self.interrupts.end()
            return result
        finally:
            changes.undo()
            self.serves = None
            self.busy.release()

    @contextmanager
    def _traced(self) -> Iterator[None]:
        if not self.traces:
            yield
            return
        trace = self.mesh.counters.trace = Trace()
        try:
            yield
        finally:
            self.mesh.counters.trace = None
        self.events = self.mesh.world.all_gather_objects(trace.events)

    @property
    def _waits(self) -> bool:
        """Whether transformer calls wait for one another."""
        return self.plan.pipe > 1 or (self.plan.cfg > 1 and self.family.cfg.style == "separate")

    def _check(self, pipe: Any, call: dict[str, Any]) -> None:
        if self._waits and torch.is_autocast_enabled(_device(pipe).type):
            raise PlanError(
                f"plan {self.plan} cannot be combined with torch.autocast, since transformer calls run later than they are "
                "made; cast the pipeline with pipe.to(dtype), or use ulysses or ring"
            )
        for name, binding in self.bindings.items():
            transformer = getattr(pipe, name)
            free = _free_bytes(transformer.device, self.mesh.world.size)
            self.plan.validate(self.family, transformer.config, call, self.mesh.world.size, free)
            binding.check(transformer)

    def _apply(self, changes: Changes, pipe: Any) -> None:
        for name, binding in self.bindings.items():
            binding.apply(changes, getattr(pipe, name), self.calls if self._waits else None)
        share_components(changes, self.once(pipe), self.mesh.world)

    def once(self, pipe: Any) -> dict[str, nn.Module]:
        """The modules that run on rank 0 alone."""
        return once_modules(pipe.components, set(self.bindings))


def _private_class(stock: type) -> type:
    """The pipeline's class with a request slot around `__call__`; passes for the stock class by name."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._ditpar.request(self, args, kwargs)

    __call__.__doc__ = stock.__call__.__doc__
    __call__.__signature__ = inspect.signature(stock.__call__)  # type: ignore[attr-defined]

    def progress_bar(self: Any, *args: Any, **kwargs: Any) -> Any:
        bar = stock.progress_bar(self, *args, **kwargs)  # type: ignore[attr-defined]
        engine: Engine = self._ditpar
        if engine.rank > 0:
            bar.disable = True
        return bar

    def device(self: Any) -> torch.device:
        """Where the transformer is: other modules may be mere shapes on this rank."""
        return _device(self)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        """Copies and pickles are stock pipelines: a plan is bound to one instance in one process group."""
        return _blank, (stock,), {k: v for k, v in vars(self).items() if k != "_ditpar"}

    body: dict[str, Any] = {
        "__call__": __call__,
        "__reduce_ex__": __reduce_ex__,
        "progress_bar": progress_bar,
        "device": property(device),
    }
    if hasattr(stock, "interrupt"):

        def interrupt(self: Any) -> bool:
            """Whether to stop; the loop reads it once a step, and any rank's wish holds for all."""
            wish = bool(stock.interrupt.fget(self))
            engine: Engine = self._ditpar
            if engine.serves != threading.get_ident() or engine.mesh.world.size == 1:
                return wish
            # Only what was agreed on: a wish that comes meanwhile, from another thread, is for the next step.
            agreed = engine.interrupts.agreed(wish)
            if agreed:
                self._interrupt = True
            return agreed

        body["interrupt"] = property(interrupt)
    body.update(__module__=stock.__module__, __qualname__=stock.__qualname__, __doc__=stock.__doc__)
    return type(stock.__name__, (stock,), body)


def parallelize(pipe: Any, plan: Plan | str = "auto") -> Any:
    """Binds a plan to a diffusers pipeline. Returns the same object.

    Works inside any process group: every rank calls it, then calls the pipeline with the same arguments. Only this
    instance changes, and `restore` changes it back. Calling it again binds another plan.

    Args:
        pipe: a diffusers pipeline whose transformer has a family record.
        plan: a Plan, its text form (`cfg=2,ulysses=2`), or `auto`.

    Raises:
        ModelError: no family record for the transformer's class.
        PlanError: the plan cannot be right for this model or number of ranks; says what would work.
    """
    _unbind(pipe)
    names = transformer_names(pipe)
    families = {family_of(type(_unwrapped(getattr(pipe, name))).__name__).name: name for name in names}
    if len(families) != 1:
        raise ModelError(f"{type(pipe).__name__} has no transformer, or transformers of different families: {families}")
    family = family_of(type(_unwrapped(getattr(pipe, names[0]))).__name__)
    config = getattr(pipe, names[0]).config
    world = dist.get_world_size() if dist.is_initialized() else 1
    chosen = auto(family, config, None, world) if plan == "auto" else Plan.parse(plan)
    chosen.validate(family, config, None, world)
    stock = type(pipe)
    engine = Engine(pipe, chosen, family, stock)
    for name, binding in engine.bindings.items():
        binding.check(getattr(pipe, name))
    if chosen.components == "rank0":
        drop_weights(engine.once(pipe), engine.mesh.world)
    vars(pipe)["_ditpar"] = engine
    pipe.__class__ = _private_class(stock)
    return pipe


def restore(pipe: Any) -> Any:
    """Undoes `parallelize`: the pipeline has its own class again and nothing of ditpar. Returns the same object.

    Blocks that `load_stage` left out are read from the model's files. Under `components=rank0` it fetches the dropped
    weights from rank 0, so every rank must call it.
    """
    _unbind(pipe)
    for name in transformer_names(pipe):
        complete(_unwrapped(getattr(pipe, name)))
    return pipe


def _unbind(pipe: Any) -> None:
    engine = vars(pipe).pop("_ditpar", None)
    if engine is not None:
        pipe.__class__ = engine.stock
        if engine.plan.components == "rank0":
            fetch_weights(engine.once(pipe), engine.mesh.world, _device(pipe))


def _blank(stock: type) -> Any:
    return object.__new__(stock)


def transformer_names(pipe: Any) -> list[str]:
    """The pipeline's transformers by attribute name."""
    return [name for name in _TRANSFORMERS if isinstance(getattr(pipe, name, None), nn.Module)]


def _unwrapped(module: Any) -> Any:
    return getattr(module, "_orig_mod", module)


def _device(pipe: Any) -> torch.device:
    device = getattr(pipe, transformer_names(pipe)[0]).device
    return torch.device("cpu") if device.type == "meta" else device


def _free_bytes(device: torch.device, ranks: int) -> int:
    """Bytes that this rank may still take on its device; a CPU's memory is shared by the ranks of the host."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available // ranks
