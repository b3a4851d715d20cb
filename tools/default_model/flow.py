"""Stage 4: transformer and text encoders learn rectified flow (arXiv 2209.03003), on two processes of one thread each.

The bf16 weights of both processes lie in one shared buffer; each holds fp32 masters, momenta and averages of half of
the parameters only (ZeRO-1, arXiv 1910.02054) and updates those.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn

from default_model import flat, network, tokens
from default_model.batches import PHASES, Batch, Batches, Phase
from default_model.muon import Muon

WORLD, SEED, MUON_RATE, ADAM_RATE, AVERAGE = 2, 0, 2e-3, 1e-3, 0.995
SAVE_EVERY_S = 240.0


@dataclass(frozen=True)
class Schedule:
    """How long, and how.

    Attributes:
        minutes: of the whole schedule; rates follow the clock.
        small: share of the time at 128 pixels.
        decay: share of the time from which the rates fall.
        stop: minutes after which to stop all the same.
        warm_up: steps.
        only: captions to restrict the pictures to.
        compiled: False for a trial, which compilation would dominate.
    """

    minutes: float
    small: float
    decay: float = 0.6
    stop: float = float("inf")
    warm_up: int = 100
    only: frozenset[str] | None = None
    compiled: bool = True


def train(work: Path, schedule: Schedule, name: str, resume: str | None = None) -> None:
    """Writes the averaged weights as checkpoint `name`, beginning from checkpoint `resume`."""
    nets = network.build(work, SEED)
    named, bounds = _layout(nets)
    weights = flat.flatten(p for _, p in named)
    if resume:
        weights = restored(work / resume, [n for n, _ in named])
    shared = _Shared(
        weights=weights.bfloat16().share_memory_(),
        gradients=torch.zeros(WORLD, bounds[-1], dtype=torch.bfloat16).share_memory_(),
        average=weights.clone().share_memory_(),
        done=torch.zeros(1, dtype=torch.float64).share_memory_(),
        barrier=mp.get_context("spawn").Barrier(WORLD),
    )
    mp.spawn(_rank, args=(work, schedule, name, shared), nprocs=WORLD)


def restored(checkpoint: Path, names: list[str]) -> torch.Tensor:
    """A checkpoint's weights as one vector, in the order of `names`."""
    found = torch.load(checkpoint)
    if found["names"] != names:
        raise ValueError(f"{checkpoint} is of another network")
    return found["flat"]


def load_weights(nets: nn.ModuleDict, checkpoint: Path) -> None:
    """Puts a checkpoint into the networks."""
    named, _ = _layout(nets)
    flat.fill([p for _, p in named], restored(checkpoint, [n for n, _ in named]))


@dataclass
class _Shared:
    """Buffers in shared memory: bf16 weights [size], gradients [world, size], average [size], share of the time."""

    weights: torch.Tensor
    gradients: torch.Tensor
    average: torch.Tensor
    done: torch.Tensor
    barrier: Any


def _by_muon(name: str, parameter: torch.Tensor) -> bool:
    return parameter.ndim == 2 and "transformer_blocks." in name and ".linear." not in name


def _layout(nets: nn.ModuleDict) -> tuple[list[tuple[str, nn.Parameter]], list[int]]:
    """Parameters in the flat order, and bounds of [muon, rank 0 | adam, rank 0 | muon, rank 1 | adam, rank 1]."""
    named = list(nets.named_parameters())
    muon = sorted((x for x in named if _by_muon(*x)), key=lambda x: tuple(sorted(x[1].shape)))
    adam = [x for x in named if not _by_muon(*x)]
    half, cut, size = sum(p.numel() for _, p in adam) / 2, 0, 0
    while size < half:
        size += adam[cut][1].numel()
        cut += 1
    parts = [muon[0::2], adam[:cut], muon[1::2], adam[cut:]]
    bounds = [0]
    for part in parts:
        bounds.append(bounds[-1] + sum(p.numel() for _, p in part))
    return [x for part in parts for x in part], bounds


class _Update:
    """One process's half of the parameters."""

    def __init__(self, rank: int, named: list[tuple[str, nn.Parameter]], bounds: list[int], shared: _Shared) -> None:
        self.low, self.middle, self.high = bounds[2 * rank : 2 * rank + 3]
        self.shared = shared
        self.master = shared.average[self.low : self.high].clone()
        places = zip(named, flat.offsets([p for _, p in named]), strict=False)
        matrices = [(o - self.low, (p.shape[0], p.shape[1])) for (_, p), o in places if self.low <= o < self.middle]
        self.muon = Muon(self.middle - self.low, matrices)
        self.rest = nn.Parameter(self.master[self.middle - self.low :].clone())
        self.adam = torch.optim.AdamW([self.rest], lr=ADAM_RATE, betas=(0.9, 0.98), weight_decay=0.0, fused=True)

    def step(self, number: int, factor: float) -> None:
        """Steps with the mean gradient, rates scaled by `factor`, and publishes the weights."""
        own = slice(self.low, self.high)
        gradient = self.shared.gradients[:, own].float().mean(0)
        cut = self.middle - self.low
        self.muon.step(self.master[:cut], gradient[:cut], MUON_RATE * factor)
        norm = float(gradient[cut:].norm())
        self.rest.grad = gradient[cut:] * min(1.0, 0.5 / (norm + 1e-8))
        self.adam.param_groups[0]["lr"] = ADAM_RATE * factor
        self.adam.step()
        self.master[cut:].copy_(self.rest.detach())
        self.shared.weights[own].copy_(self.master)
        if number % 4 == 0:
            kept = min(AVERAGE, (number + 1) / (number + 20)) ** 4
            self.shared.average[own].lerp_(self.master, 1 - kept)


def _rank(rank: int, work: Path, schedule: Schedule, name: str, shared: _Shared) -> None:
    torch.set_num_threads(1)
    nets = network.build(work, SEED)
    named, bounds = _layout(nets)
    update = _Update(rank, named, bounds, shared)
    nets.to(torch.bfloat16)
    parameters = [p for _, p in named]
    for parameter, view in zip(parameters, flat.views(shared.weights, parameters), strict=True):
        parameter.data = view
    gradients = list(flat.views(shared.gradients[rank], parameters))
    batches = Batches(work, SEED + 1 + rank, set(schedule.only) if schedule.only else None)
    _prepare(nets["transformer"], schedule.compiled)
    if schedule.compiled:
        for phase in PHASES:  # before the clock starts
            _loss(nets, batches.next(phase), phase).backward()
        nets.zero_grad(set_to_none=True)
    shared.barrier.wait()
    begun = saved = time.time()
    step, pictures, losses = 0, 0, []
    while True:
        if rank == 0:
            shared.done[0] = (time.time() - begun) / (schedule.minutes * 60)
        shared.barrier.wait()
        done = float(shared.done)
        if done >= 1 or done * schedule.minutes >= schedule.stop:
            break
        phase = PHASES[0] if done < schedule.small else PHASES[1]
        loss = _loss(nets, batches.next(phase), phase)
        loss.backward()
        for kept, parameter in zip(gradients, parameters, strict=True):
            kept.copy_(parameter.grad) if parameter.grad is not None else kept.zero_()
        nets.zero_grad(set_to_none=True)
        shared.barrier.wait()  # all gradients are written, nobody reads the weights
        step += 1
        update.step(step, _factor(step, done, schedule))
        pictures += WORLD * phase.batch
        losses.append(float(loss.detach()))
        if rank == 0 and (step % 100 == 0 or step in (1, 10)):
            mean = sum(losses) / len(losses)
            print(f"step {step}, {time.time() - begun:.0f} s, {phase.latents}, loss {mean:.4f}", flush=True)
            losses.clear()
        shared.barrier.wait()  # all weights are written
        if rank == 0 and time.time() - saved > SAVE_EVERY_S:
            _save(work / name, shared, named)
            saved = time.time()
    if rank == 0:
        _save(work / name, shared, named)
        print(f"{step} steps, {pictures} pictures of {len(batches.captions)} captions")


def _factor(step: int, done: float, schedule: Schedule) -> float:
    """Warm-up, flat, then a linear fall to 0.02 of the rates."""
    falling = 1.0 if done < schedule.decay else max(0.02, (1 - done) / (1 - schedule.decay))
    return min(1.0, step / schedule.warm_up) * falling


def _prepare(transformer: Any, compiled: bool) -> None:
    # The backward of torch's flash attention is slow on CPUs in bf16; plain matmuls also compile.
    for processor in transformer.attn_processors.values():
        processor._attention_backend = "_native_math"
    if compiled:
        transformer.compile_repeated_blocks(dynamic=False)


def _loss(nets: nn.ModuleDict, batch: Batch, phase: Phase) -> torch.Tensor:
    """MSE of the velocity that leads from the noise to the picture."""
    sigmas = batch.sigmas.view(-1, 1, 1)
    noisy = (1 - sigmas) * batch.clean + sigmas * batch.noise
    velocity = nets["transformer"](
        hidden_states=noisy.bfloat16(),
        encoder_hidden_states=nets["text_encoder_2"](batch.t5)[0],
        pooled_projections=nets["text_encoder"](batch.clip).pooler_output,
        timestep=batch.sigmas.bfloat16(),
        img_ids=network.image_ids(phase.side, phase.scale),
        txt_ids=torch.zeros(tokens.LENGTH, 3),
        return_dict=False,
    )[0]
    return F.mse_loss(velocity.float(), batch.noise - batch.clean)


def _save(path: Path, shared: _Shared, named: list[tuple[str, nn.Parameter]]) -> None:
    temporary = path.with_suffix(".tmp")
    torch.save({"flat": shared.average.clone(), "names": [n for n, _ in named]}, temporary)
    os.replace(temporary, path)
