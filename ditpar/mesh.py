"""Mesh: the ranks laid out along a plan's axes, and the groups that methods talk in."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ditpar.comm import Counters, Group
from ditpar.errors import PlanError
from ditpar.plan import AXES, Plan
from ditpar.shared import Channel, connect

TIMEOUT_S = 600.0
"""Seconds without a message from a peer after which a wait in shared memory fails."""


@dataclass
class Health:
    """Of all groups of the default process group.

    Attributes:
        broken: a request failed midway, so that messages of it are left between ranks.
    """

    broken: bool = False


@dataclass
class Mesh:
    """This rank's groups under a plan.

    Attributes:
        batch: ranks that share out the batch of one transformer call (data, and cfg when both branches are one call).
        cfg: ranks that run the branches of guidance.
        ulysses, ring: ranks that share one token sequence.
        sequence: ring x ulysses, ring outermost.
        pipe: the stages of one model, in order.
        back: the same ranks, for what goes from the last stage to the first: a communicator of its own.
        world: all ranks, over a CPU-capable backend (control messages).
    """

    plan: Plan
    batch: Group
    cfg: Group
    data: Group
    ulysses: Group
    ring: Group
    sequence: Group
    pipe: Group
    back: Group
    world: Group
    counters: Counters = field(default_factory=Counters)
    health: Health = field(default_factory=Health)


_laid_out: dict[object, Any] = {}
"""What was made in the present default process group, by layout: to make it again at each `parallelize` would leak it."""


def _layouts() -> dict[object, Any]:
    if _laid_out.get("group") is not dist.group.WORLD:
        _laid_out.clear()  # another world: what belonged to the last one can go
        _laid_out["group"] = dist.group.WORLD
    return _laid_out


def build_mesh(plan: Plan, device: torch.device) -> Mesh:
    """Lays out the default process group's ranks. Raises PlanError when their number is not the plan's,
    or when a request that failed has left messages that cannot be got rid of.

    Collective: every rank must call it, with the same plan.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world != plan.world:
        raise PlanError(f"plan: {plan} needs {plan.world} ranks but the process group has {world}")
    counters = Counters()
    alone = Group([dist.get_rank() if dist.is_initialized() else 0], 0, None, counters)
    if world == 1:
        return Mesh(plan, alone, alone, alone, alone, alone, alone, alone, alone, alone, counters)
    degrees = {axis: n for axis, n in plan.degrees.items() if n > 1}
    made = _layouts()
    if made.get("health", Health()).broken:
        if made.get("channels") is None:
            raise PlanError(
                "plan: a request failed inside a transformer call, and messages of it are still on their way; "
                "start the ranks again"
            )
        made.clear()  # new sockets: nothing comes out of the old ones
        made = _layouts()

    def once(key: object, make: Callable[[], Any]) -> Any:
        if key not in made:
            made[key] = make()
        return made[key]

    layout = (device.type, *degrees.items())
    mesh = once(layout, lambda: init_device_mesh(device.type, tuple(degrees.values()), mesh_dim_names=tuple(degrees)))

    channels = once("channels", lambda: _channels(world)) if device.type == "cpu" else None

    def group(*axes: str) -> Group:
        named = tuple(axis for axis in AXES if axis in axes and axis in degrees)
        if not named:
            return alone
        flat = len(named) == 1
        part = once((layout, named), lambda: mesh[named] if flat else mesh[named]._flatten("_".join(named)))
        return Group(part.mesh.tolist(), part.get_local_rank(), part.get_group(), counters, channels)

    control = None if dist.get_backend() == "gloo" else once("control", lambda: dist.new_group(backend="gloo"))
    everyone = Group(range(world), dist.get_rank(), control, counters)
    pipe = group("pipe")
    back = pipe
    if plan.pipe > 1 and channels is None:
        rows = mesh.mesh.movedim(list(degrees).index("pipe"), -1).reshape(-1, plan.pipe).tolist()
        back = Group(pipe.ranks, pipe.index, once((layout, "back"), lambda: _own_group(rows)), counters)
    return Mesh(
        plan,
        batch=group("data", "cfg"),
        cfg=group("cfg"),
        data=group("data"),
        ulysses=group("ulysses"),
        ring=group("ring"),
        sequence=group("ring", "ulysses"),
        pipe=pipe,
        back=back,
        world=everyone,
        counters=counters,
        health=once("health", Health),
    )


def _own_group(lists: list[list[int]]) -> dist.ProcessGroup:
    """A new process group of this rank's list. Every rank makes all of them, in the same order."""
    mine, _ = dist.new_subgroups_by_enumeration(lists)
    return mine


def _channels(world: int) -> dict[int, Channel] | None:
    """Shared memory between all ranks, when gloo would carry the messages and all are on this host."""
    wanted = dist.get_backend() == "gloo" and os.environ.get("DITPAR_TRANSPORT", "shared") == "shared"

    def all_gather(value: object) -> list[Any]:
        found: list[Any] = [None] * world
        dist.all_gather_object(found, value)
        return found

    if not all(all_gather(wanted)):
        return None
    return connect(dist.get_rank(), world, all_gather, TIMEOUT_S)
