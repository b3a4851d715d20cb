"""ditpar: parallel inference for diffusion transformers, on the stock diffusers pipeline object."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ditpar.engine.parallel import parallelize, restore
    from ditpar.engine.partial import load_stage
    from ditpar.errors import DitparError, GangError, ModelError, PlanError, RequestError
    from ditpar.gang.load import load
    from ditpar.plan import Plan
    from ditpar.request import Request

__version__ = "0.1.0"
__all__ = [
    "DitparError",
    "GangError",
    "ModelError",
    "Plan",
    "PlanError",
    "Request",
    "RequestError",
    "load",
    "load_stage",
    "parallelize",
    "restore",
]

_HOMES = {
    "parallelize": "engine.parallel",
    "restore": "engine.parallel",
    "load": "gang.load",
    "load_stage": "engine.partial",
    "Plan": "plan",
    "Request": "request",
}


def __getattr__(name: str) -> Any:
    # Loaded at first use: `import ditpar` alone must not take the seconds that torch and diffusers take.
    if name not in __all__:
        raise AttributeError(f"module 'ditpar' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ditpar.{_HOMES.get(name, 'errors')}"), name)
