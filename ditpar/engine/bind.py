"""Binds a plan's methods to one transformer for the time of one request."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import Any

import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from torch import nn

from ditpar.attention.site import Site, twin
from ditpar.engine.undo import Changes, wrap_call
from ditpar.errors import PlanError
from ditpar.family import Family, Slice
from ditpar.mesh import Mesh
from ditpar.methods import batch, guidance
from ditpar.methods.root import as_stock, innermost
from ditpar.methods.sequence import Sequence

RING_BACKENDS = ("native", "_native_flash", "_native_efficient")


class Binding:
    """One transformer under a plan.

    Sites and their twins are kept between requests, so that compiled blocks meet the same objects again.
    """

    def __init__(self, name: str, family: Family, mesh: Mesh) -> None:
        self.name, self.family, self.mesh = name, family, mesh
        self.sequence = Sequence(family, mesh) if mesh.sequence.size > 1 else None
        self.token = torch.zeros((), dtype=torch.int64)
        self._twins: dict[str, tuple[Any, Any]] = {}

    def check(self, transformer: nn.Module) -> None:
        """Refuses, before any work, what would be silently wrong under the plan.

        Raises PlanError naming compile calls, caches and processors that do not go with it.
        """
        plan, name = self.mesh.plan, self.name
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
        if getattr(transformer, "is_cache_enabled", False):
            raise PlanError(
                f"{name} has a step cache enabled, whose decisions may differ between ranks; call {name}.disable_cache() "
                "or use plan single"
            )
        if getattr(transformer, "_parallel_config", None) is not None:
            raise PlanError(f"{name} already runs diffusers' own enable_parallelism; load it again to use plan {plan}")
        if self.sequence:
            for path, site, _ in self._sites(transformer):
                kind = type(site.processor).__name__
                if kind not in self.family.processors:
                    raise PlanError(
                        f"{name}.{path} has attention processor {kind}; ring and ulysses know "
                        f"{', '.join(self.family.processors)}; use cfg or data"
                    )
                if plan.ring > 1:
                    self._check_backend(f"{name}.{path}", site.processor)

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

    def apply(self, changes: Changes, transformer: nn.Module, branches: guidance.Branches | None) -> None:
        """Installs the methods on the instance. `branches` when this request's guidance makes separate calls."""
        family, mesh = self.family, self.mesh
        if mesh.plan.world == 1:
            return
        root = innermost(transformer._call_impl)
        if self.sequence:
            self._apply_sequence(changes, transformer, self.sequence)
            root = self.sequence.root(root)
        group, method = (mesh.data, "data") if branches else (mesh.batch, "cfg" if mesh.cfg.size > 1 else "data")
        if group.size > 1:
            root = batch.batch_split(family, group, method, root)
        if branches:
            root = branches.defer(family, transformer, root)
        wrap_call(changes, transformer, lambda _: as_stock(family, transformer, root))

    def _apply_sequence(self, changes: Changes, transformer: nn.Module, sequence: Sequence) -> None:
        by_module: defaultdict[str, list[Slice]] = defaultdict(list)
        for s in self.family.slices:
            if s.source != "block":
                by_module[s.source].append(s)
        for path, slices in by_module.items():
            wrap_call(changes, transformer.get_submodule(path), partial(sequence.prologue, slices))
        for block in self._blocks(transformer).values():
            wrap_call(changes, block, partial(sequence.block, block))
        wrap_call(changes, transformer.get_submodule(self.family.exit), sequence.exit)
        for path, module, rows in self._sites(transformer):
            stock = module.processor
            known = self._twins.get(path)
            if known is None or known[0] is not stock:
                known = self._twins[path] = (stock, twin(stock, Site(sequence, rows, self.token)))
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
