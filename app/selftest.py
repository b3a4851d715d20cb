"""`ditpar selftest`: every built method against one device, on this machine."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from ditpar.app import exits
from ditpar.app.ranks import device_of, on_ranks
from ditpar.conformance.selftest import parity
from ditpar.errors import RequestError
from ditpar.family import families

TIMEOUT_S = 300.0


def run(names: list[str], as_json: bool) -> int:
    """Prints a table; returns 0 when every row is within its bound, else 5."""
    unknown = sorted(set(names) - set(families()))
    if unknown:
        raise RequestError(f"--family {unknown[0]}: known are {', '.join(families())}")
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    rows: list[dict[str, Any]] = []
    for world in (2, 4) if devices >= 4 or devices < 2 else (2,):
        ranks = on_ranks(on_rank, world, names or list(families()), timeout=TIMEOUT_S)
        rows += [max(cell, key=lambda row: row["error"]) for cell in zip(*ranks, strict=True)]
    where = f"{devices} CUDA devices" if devices >= 2 else "CPU ranks over gloo"
    ok = all(row["ok"] for row in rows)
    if as_json:
        print(json.dumps({"devices": where, "rows": rows, "ok": ok}))
    else:
        print(f"Relative L2 to one device, on {where}:")
        for row in rows:
            mark = "ok" if row["ok"] else "WRONG"
            print(f"  {row['family']:10} {row['plan']:18} {row['dtype']:9} {row['error']:.1e}  {mark}")
        print("all within their bounds" if ok else "some results are WRONG; please report this table")
    return exits.OK if ok else exits.ENGINE


def on_rank(names: list[str]) -> list[dict[str, Any]]:
    """What each rank runs: all families, all plans of this world's size."""
    world = dist.get_world_size()
    device = device_of(dist.get_rank(), world)
    return [row for name in names for row in parity(name, world, device)]
