"""Runs a function on a few fresh ranks: what `doctor` and `selftest` measure with."""

from __future__ import annotations

import datetime
import multiprocessing
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ditpar.errors import GangError


def on_ranks(function: Callable[..., Any], world: int, *args: Any, timeout: float) -> list[Any]:
    """`function(*args)` on `world` ranks in a process group of this machine's devices; their results in order.

    CUDA devices with NCCL when there are enough, else CPUs with gloo, one thread a rank. Raises GangError when a rank
    raises, dies or takes more than `timeout` seconds; no rank outlives this call.
    """
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory(prefix="ditpar-") as folder:
        store = str(Path(folder) / "store")
        ranks = [
            context.Process(target=_rank, args=(r, world, store, timeout, results, function, args), daemon=True)
            for r in range(world)
        ]
        for process in ranks:
            process.start()
        found: dict[int, Any] = {}
        end = time.monotonic() + timeout
        try:
            while len(found) < world:
                dead = [r for r, p in enumerate(ranks) if r not in found and p.exitcode is not None]
                try:
                    rank, value, error = results.get(timeout=0.5)
                except queue.Empty:
                    if dead:
                        raise GangError(f"rank {dead[0]} died, exit code {ranks[dead[0]].exitcode}", dead[0]) from None
                    if time.monotonic() > end:
                        missing = min(set(range(world)) - set(found))
                        raise GangError(f"rank {missing} did not answer within {timeout:.0f} s", missing) from None
                    continue
                if error:
                    raise GangError(f"rank {rank} raised", rank, error)
                found[rank] = value
            for process in ranks:
                process.join(5)
        finally:
            for process in ranks:
                process.kill()
                process.join()
    return [found[r] for r in range(world)]


def device_of(rank: int, world: int) -> torch.device:
    """The device that a rank uses."""
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= world
    return torch.device("cuda", rank) if cuda else torch.device("cpu")


def _rank(
    rank: int, world: int, store: str, timeout: float, results: Any, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    try:
        torch.set_num_threads(1)
        device = device_of(rank, world)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=timeout),
        )
        results.put((rank, function(*args), None))
        dist.barrier()
        dist.destroy_process_group()
    except Exception:  # noqa: BLE001  reported by the caller with its traceback
        results.put((rank, None, traceback.format_exc()))
    results.close()
    results.join_thread()
