"""`ditpar doctor`: what this machine has, how fast two ranks exchange, and what is missing."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import time
from typing import Any

import psutil
import torch
import torch.distributed as dist

from ditpar.app import exits
from ditpar.app.ranks import device_of, on_ranks
from ditpar.comm import Group
from ditpar.errors import GangError
from ditpar.mesh import build_mesh
from ditpar.plan import Plan

NEEDED = ("torch", "diffusers", "transformers", "accelerate", "safetensors", "numpy", "pillow")
OPTIONAL = {
    "triton": "the merge kernel of ring attention on GPUs",
    "peft": "LoRA",
    "sentencepiece": "tokenizers of larger models",
    "protobuf": "tokenizers of larger models",
}
TIMEOUT_S = 60.0
SIZES = (1 << 10, 1 << 20, 1 << 24)


def run(as_json: bool) -> int:
    """Prints what was found; returns 0 when ditpar can run here, else 5."""
    found: dict[str, Any] = {"python": platform.python_version(), "system": platform.platform(terse=True)}
    missing = [name for name in NEEDED if _version(name) is None]
    found["versions"] = {name: _version(name) for name in ("ditpar", *NEEDED, *OPTIONAL)}
    found["devices"] = _devices()
    found["threads"] = torch.get_num_threads()
    found["backends"] = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "shared memory": hasattr(os, "memfd_create"),
    }
    try:
        found["two ranks"] = on_ranks(transfers, 2, timeout=TIMEOUT_S)[0]
    except GangError as error:
        found["two ranks"] = {"failed": str(error)}
    advice = [f"{name} is missing: pip install {name}" for name in missing]
    advice += [f"{n} is not installed ({w}): pip install {n}" for n, w in OPTIONAL.items() if _version(n) is None]
    if not torch.cuda.is_available():
        advice.append("no CUDA device: ranks run on the CPU, which is right but slow for large models")
    found["advice"] = advice
    usable = not missing and "failed" not in found["two ranks"]
    found["usable"] = usable
    if as_json:
        print(json.dumps(found))
    else:
        _print(found)
    return exits.OK if usable else exits.ENGINE


def transfers() -> dict[str, float]:
    """On two ranks: microseconds of an exchange by size, of an all-reduced flag, and the transport used."""
    device = device_of(dist.get_rank(), 2)
    mesh = build_mesh(Plan(ulysses=2), device)
    times: dict[str, float] = {}
    for size in SIZES:
        mine, other = torch.ones(size // 4, device=device), torch.empty(size // 4, device=device)
        times[f"exchange of {_bytes(size)}, us"] = _timed(mesh.ulysses, mine, other)
    begun = time.perf_counter()
    for _ in range(20):
        mesh.world.max(1)
    times["agreement on a flag, us"] = round((time.perf_counter() - begun) / 20 * 1e6, 1)
    times["through shared memory"] = float(mesh.ulysses.channels is not None)
    return times


def _timed(group: Group, mine: torch.Tensor, other: torch.Tensor) -> float:
    best = float("inf")
    for _ in range(10):
        begun = time.perf_counter()
        group.exchange("doctor", [mine, mine], [other, other])
        if mine.is_cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begun)
    return round(best * 1e6, 1)


def _devices() -> list[str]:
    memory = psutil.virtual_memory()
    cpu = f"cpu: {os.cpu_count()} cores, {_bytes(memory.available)} of {_bytes(memory.total)} free"
    cuda = range(torch.cuda.device_count()) if torch.cuda.is_available() else []
    return [cpu] + [
        f"cuda:{i}: {torch.cuda.get_device_name(i)}, {_bytes(torch.cuda.mem_get_info(i)[0])} free" for i in cuda
    ]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _bytes(count: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count //= 1024
    return f"{count:.0f} GiB"


def _print(found: dict[str, Any]) -> None:
    for name, value in found.items():
        if isinstance(value, dict):
            print(f"{name}:")
            for key, item in value.items():
                print(f"  {key:28} {item if item is not None else 'not installed'}")
        elif isinstance(value, list):
            print(f"{name}:" if value else f"{name}: none")
            for item in value:
                print(f"  {item}")
        else:
            print(f"{name}: {value}")
