"""Binds a plan's methods to one transformer for the time of one request."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from torch import Tensor, nn

from ditpar.attention.site import Site, twin
from ditpar.engine.partial import is_partial
from ditpar.engine.undo import Changes, wrap_call
from ditpar.errors import PlanError
from ditpar.family import Family, Slice
from ditpar.mesh import Mesh
from ditpar.methods import batch
from ditpar.methods.calls import Calls
from ditpar.methods.root import Arguments, Root, as_stock, innermost
from ditpar.methods.sequence import Sequence
from ditpar.methods.stages import Stage

RING_BACKENDS = ("native", "_native_flash", "_native_efficient")


class Binding:
    """One transformer under a plan.

    Sites and their twins are kept between requests, so that compiled blocks meet the same objects again.
    """

    def __init__(self, name: str, family: Family, mesh: Mesh, transformer: nn.Module) -> None:
        self.name, self.family, self.mesh = name, family, mesh
        self.stage = Stage(family, mesh, transformer) if mesh.plan.pipe > 1 else None
        cuts = self.stage is not None or mesh.sequence.size > 1
        self.sequence = Sequence(family, mesh, self.stage) if cuts else None
        self.token = torch.zeros((), dtype=torch.int64)
        self._twins: dict[str, tuple[Any, Any]] = {}

    def check(self, transformer: nn.Module) -> None:
        """Refuses, before any work, what would be silently wrong under the plan.

        Raises PlanError naming compile calls, caches and processors that do not go with it.
        """
        plan, name = self.mesh.plan, self.name
        if is_partial(transformer) and (self.stage is None or any(p.is_meta for p in self._own(transformer))):
            raise PlanError(
                f"{name} holds one stage of another plan than {plan} alone; call ditpar.restore first, which reads the "
                "rest of the model"
            )
        if plan.world == 1:
            return
        if (
            isinstance(transformer, torch._dynamo.eval_frame.OptimizedModule)
            or transformer._compiled_call_impl is not None
        ):
            raise PlanError(
                f"{name} is compiled as a whole, which cannot be combined with plan {plan}; "
                f"use {name}.compile_repeated_blocks() instead"
            )
        if getattr(transformer, "is_cache_enabled", False) or (hook := _stateful_hook(transformer)):
            what = (
                "a step cache enabled"
                if getattr(transformer, "is_cache_enabled", False)
                else f"the stateful hook {hook}"
            )
            raise PlanError(
                f"{name} has {what}, whose decisions may differ between ranks; call {name}.disable_cache(), remove the "
                "hook, or use plan single"
            )
        if getattr(transformer, "_parallel_config", None) is not None:
            raise PlanError(f"{name} already runs diffusers' own enable_parallelism; load it again to use plan {plan}")
        if self.stage is not None and (offload := offloaded(transformer)):
            raise PlanError(
                f"{name} is offloaded ({offload}), which goes with no stage pipeline, whose ranks each hold their own "
                f"blocks on the device; load it without offload, or use plan cfg, ulysses or ring"
            )
        if self.stage is not None and len(self._blocks(transformer)) != self.stage.ending.stop:
            raise PlanError(
                f"{name} has {len(self._blocks(transformer))} blocks but had {self.stage.ending.stop} when plan {plan} "
                "was bound; call ditpar.parallelize again"
            )
        if self.sequence:
            for path, site, _ in self._sites(transformer):
                kind = type(site.processor).__name__
                if kind not in self.family.processors:
                    raise PlanError(
                        f"{name}.{path} has attention processor {kind}; ring, ulysses and pipe know "
                        f"{', '.join(self.family.processors)}; use cfg or data"
                    )
                if plan.ring > 1:
                    self._check_backend(f"{name}.{path}", site.processor)

    def _own(self, transformer: nn.Module) -> Iterator[nn.Parameter]:
        assert self.stage is not None
        for block in list(self._blocks(transformer).values())[self.stage.begin : self.stage.end]:
            yield from block.parameters()

    @staticmethod
    def _check_backend(where: str, processor: Any) -> None:
        if not hasattr(processor, "_attention_backend"):
            return
        chosen = processor._attention_backend or _AttentionBackendRegistry.get_active_backend()[0]
        backend = str(getattr(chosen, "value", chosen))
        if backend not in RING_BACKENDS:
            raise PlanError(
                f"{where} has attention backend {backend}; ring needs a log-sum-exp and so computes with torch's own "
                f"({', '.join(RING_BACKENDS)}); use ulysses, or set_attention_backend('native')"
            )

    def apply(self, changes: Changes, transformer: nn.Module, calls: Calls | None) -> None:
        """Installs the methods on the instance. `calls` when this request's calls wait for one another."""
        family, mesh = self.family, self.mesh
        if mesh.plan.world == 1:
            if mesh.counters.trace is not None:
                wrap_call(changes, transformer, partial(_timed, self.name, mesh))
            return
        root = _traced(self.name, mesh, self.stage, innermost(transformer._call_impl))
        if self.sequence:
            self._apply_sequence(changes, transformer, self.sequence)
            root = self.sequence.root(root)
        if self.stage:
            root = _banded(self.stage, root)
        branches = calls is not None and calls.cfg is not None
        group, method = (mesh.data, "data") if branches else (mesh.batch, "cfg" if mesh.cfg.size > 1 else "data")
        if group.size > 1:
            root = batch.batch_split(family, group, method, root, gathers=self.stage is None or self.stage.last)
        if calls:
            root = calls.defer(self.name, transformer, self.stage, root)
        call = as_stock(family, transformer, root)

        def checked(*args: Any, **kwargs: Any) -> Any:
            for path, site, _ in self._sites(transformer) if self.sequence else ():
                if site.processor is not self._twins[path][1]:
                    raise PlanError(
                        f"{self.name}.{path}: its attention processor was set to {type(site.processor).__name__} during "
                        f"the request, which plan {mesh.plan} cannot follow; use plan single"
                    )
            return call(*args, **kwargs)

        wrap_call(changes, transformer, lambda _: checked)

    def _apply_sequence(self, changes: Changes, transformer: nn.Module, sequence: Sequence) -> None:
        stage, blocks = self.stage, self._blocks(transformer)
        if stage is not None:
            for path, module, per_request in stage.once_modules(transformer, blocks):
                wrap_call(changes, module, partial(stage.memo, path, per_request))
            wrap_call(changes, transformer.get_submodule(self.family.embed.module), stage.embed)
        by_module: defaultdict[str, list[Slice]] = defaultdict(list)
        for s in self.family.slices:
            if s.source != "block":
                by_module[s.source].append(s)
        for path, slices in by_module.items():
            wrap_call(changes, transformer.get_submodule(path), partial(sequence.prologue, slices))
        for index, block in enumerate(blocks.values()):
            wrap_call(changes, block, partial(sequence.block, block, index))
        exit_module = transformer.get_submodule(self.family.exit)
        wrap_call(changes, exit_module, partial(sequence.exit, exit_module))
        for path, module, rows in self._sites(transformer):
            stock = module.processor
            known = self._twins.get(path)
            if known is None or known[0] is not stock:
                known = self._twins[path] = (
                    stock,
                    twin(stock, Site(sequence, rows, self.token), self.family.not_empty),
                )
            else:  # the twin follows its original: a backend may have been chosen since
                vars(known[1]).update(vars(stock) | {"_parallel_config": known[1]._parallel_config})
            changes.set(module, "processor", known[1])

    def _blocks(self, transformer: nn.Module) -> dict[str, nn.Module]:
        return {
            f"{name}.{i}": block
            for name in self.family.blocks
            for i, block in enumerate(transformer.get_submodule(name).children())
        }

    def _sites(self, transformer: nn.Module) -> list[tuple[str, Any, str]]:
        return [
            (f"{path}.{name}", module, rows)
            for path, block in self._blocks(transformer).items()
            for name, rows in self.family.sites.items()
            if (module := getattr(block, name, None)) is not None
        ]


def _timed(name: str, mesh: Mesh, call: Callable[..., Any]) -> Callable[..., Any]:
    """A stock transformer's call as a span of the trace."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with mesh.counters.span("compute", name, model=name):
            return call(*args, **kwargs)

    return wrapped


def _traced(name: str, mesh: Mesh, stage: Stage | None, root: Root) -> Root:
    """The transformer's own call as a span of the trace, if there is one."""

    def wrapped(arguments: Arguments) -> Tensor:
        if mesh.counters.trace is None:
            return root(arguments)
        facts: dict[str, Any] = {"model": name}
        if stage is not None:
            unit = stage.unit
            facts |= {"step": unit.tick, "call": unit.run, "kind": unit.kind.value, "rows": list(unit.rows)}
            facts["blocks"] = [stage.begin, stage.end]
        with mesh.counters.span(
            "compute", f"step {unit.tick} band {unit.part}" if stage is not None else name, **facts
        ):
            return root(arguments)

    return wrapped


def _banded(stage: Stage, root: Root) -> Root:
    """The rows of the running unit, on the last stage."""

    def wrapped(arguments: Arguments) -> Tensor:
        out = root(arguments)
        lo, hi = stage.unit.rows
        if not stage.last or hi - lo == stage.rows:
            return out
        return out.narrow(stage.family.embed.dim, lo, hi - lo).contiguous()

    return wrapped


def _stateful_hook(transformer: nn.Module) -> str:
    """A hook of diffusers that keeps something from call to call, as step caches do; empty when there is none."""
    for module in transformer.modules():
        registry = getattr(module, "_diffusers_hook", None)
        for hook in registry.hooks.values() if registry is not None else ():
            if getattr(hook, "_is_stateful", False):
                return type(hook).__name__
    return ""


def offloaded(transformer: nn.Module) -> str:
    """How the transformer's weights come and go between devices, if they do."""
    for module in transformer.modules():
        hook = getattr(module, "_hf_hook", None)
        if hook is not None and (type(hook).__name__ == "CpuOffload" or getattr(hook, "offload", False)):
            return "model or sequential CPU offload"
        registry = getattr(module, "_diffusers_hook", None)
        if registry is not None and any("offload" in name for name in registry.hooks):
            return "group offload"
    return ""
