"""What plan `single` adds to stock on the host at one rank, per transformer call and per request."""

from __future__ import annotations

import gc
import statistics
import sys
import time
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from workload import Load, pipeline, request

import ditpar

TOKENS = 4
"""Image and text tokens: so few that a call is mostly host time."""
FEW, MANY = 1, 21


class Dispatches(TorchDispatchMode):
    """Counts operators that reach the dispatcher."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def host_cost(repeats: int) -> dict[str, Any]:
    """CPU microseconds, dispatches and function calls of stock, and what plan single adds to them.

    Times are medians of pairs run in turn.

    A call's share is the difference of requests with many and few steps over the steps between; what is left of the
    short request belongs to the request.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    stock, bound = pipeline(heads=1), ditpar.parallelize(pipeline(heads=1), "single")
    pipes = {"stock": stock, "single": bound}

    def counted(pipe: Any, calls: int) -> int:
        with Dispatches() as mode:
            pipe(**request(Load(TOKENS, calls, TOKENS), guided=False))
        return mode.count

    def entered(pipe: Any, calls: int) -> int:
        events = 0

        def note(frame: Any, event: str, argument: Any) -> None:
            nonlocal events
            events += event in ("call", "c_call")

        call = request(Load(TOKENS, calls, TOKENS), guided=False)
        sys.setprofile(note)
        pipe(**call)
        sys.setprofile(None)
        return events

    def timed(pipe: Any, calls: int) -> float:
        call = request(Load(TOKENS, calls, TOKENS), guided=False)
        began = time.process_time()
        pipe(**call)
        return (time.process_time() - began) * 1e6

    dispatches = {name: (counted(pipe, FEW), counted(pipe, MANY)) for name, pipe in pipes.items()}
    times: dict[tuple[str, int], list[float]] = {(name, calls): [] for name in pipes for calls in (FEW, MANY)}
    gc.disable()
    functions = {name: (entered(pipe, FEW), entered(pipe, MANY)) for name, pipe in pipes.items()}
    for i in range(repeats):
        for calls in (FEW, MANY):
            for name in sorted(pipes, reverse=bool(i % 2)):
                times[name, calls].append(timed(pipes[name], calls))
        gc.collect()
    gc.enable()
    torch.set_num_threads(threads)

    def added(calls: int) -> list[float]:
        pairs = zip(times["single", calls], times["stock", calls], strict=True)
        return [single - stock for single, stock in pairs]

    def counts(what: str, of: dict[str, tuple[int, int]]) -> dict[str, int]:
        few, many = (of["single"][i] - of["stock"][i] for i in (0, 1))
        call = (many - few) // between
        stock = (of["stock"][1] - of["stock"][0]) // between
        return {f"call_{what}": call, f"stock_call_{what}": stock, f"request_{what}": few - FEW * call}

    between = MANY - FEW
    calls_us = [(many - few) / between for many, few in zip(added(MANY), added(FEW), strict=True)]
    low, middle, high = statistics.quantiles(calls_us, n=4)
    return {
        "call_us": middle,
        "call_us_quartiles": [low, high],
        "stock_call_us": (min(times["stock", MANY]) - min(times["stock", FEW])) / between,
        "request_us": statistics.median(added(FEW)) - FEW * middle,
        **counts("dispatches", dispatches),
        **counts("functions", functions),
    }
