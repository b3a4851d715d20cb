"""Stage 2: a small AutoencoderKL, 8 times down, 8 latent channels, on two processes of one thread each.

Two such processes beat one of two threads. Weights are bf16 with an fp32 master. It runs eagerly: the inductor of torch
2.13 gave zero gradients for channels-last bf16 input on the CPU.
"""

from __future__ import annotations

import math
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from diffusers import AutoencoderKL

from default_model import flat, group_norm, pictures
from default_model.muon import Muon

CHANNELS, WORLD, RATE, SEED = 8, 2, 1.5e-3, 0
CROPPED = 0.6
"""Share of the time with 128 pixel crops; whole pictures of 256 pixels follow."""
NOISE = 0.1
"""The posterior's standard deviation, fixed: with a learned one two tries collapsed."""


def build() -> AutoencoderKL:
    """The untrained VAE, 0.95M parameters."""
    torch.manual_seed(SEED)
    vae = AutoencoderKL(
        in_channels=3,
        out_channels=3,
        latent_channels=CHANNELS,
        block_out_channels=(16, 32, 64, 64),
        layers_per_block=1,
        norm_num_groups=8,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        mid_block_add_attention=False,
        sample_size=pictures.SIDE,
    )
    with torch.no_grad():
        vae.quant_conv.weight[CHANNELS:].zero_()
        vae.quant_conv.bias[CHANNELS:].fill_(2 * math.log(NOISE))
    return vae


def train(work: Path, minutes: float) -> None:
    """Writes `vae_raw/`. The learning rate follows the clock, so no two runs are equal."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, args=(work, minutes, f"file://{folder}/store"), nprocs=WORLD)


def _rank(rank: int, work: Path, minutes: float, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD)
    vae = build()
    master = torch.nn.Parameter(flat.flatten(vae.parameters()))
    average = master.detach().clone()
    vae = vae.to(torch.bfloat16).to(memory_format=torch.channels_last)
    group_norm.use_fast(vae)
    parameters = list(vae.parameters())
    muon = Muon(len(master), _matrices(vae))
    adam = torch.optim.AdamW([master], lr=RATE, betas=(0.9, 0.97), weight_decay=0.0, fused=True)
    by_muon = torch.zeros(len(master), dtype=torch.bool)
    for offset, (rows, columns) in _matrices(vae):
        by_muon[offset : offset + rows * columns] = True
    batches = _Batches(work, rank)
    begun, step = time.time(), 0
    while (done := _agreed((time.time() - begun) / (minutes * 60))) < 1:
        rate = RATE * min(1.0, (step + 1) / 50) * min(1.0, (1 - done) / 0.5)
        loss, mse = _loss(vae, batches.next(128 if done < CROPPED else pictures.SIDE), sharp=step > 150)
        loss.backward()
        gradient = flat.flatten(p.grad for p in parameters if p.grad is not None) / WORLD
        dist.all_reduce(gradient)
        gradient *= min(1.0, 1.0 / (float(gradient.norm()) + 1e-6))
        muon.step(master.data, gradient, rate)
        master.grad = gradient.masked_fill(by_muon, 0)
        adam.param_groups[0]["lr"] = rate
        adam.step()
        flat.fill(parameters, master.detach())
        vae.zero_grad(set_to_none=True)
        step += 1
        average.lerp_(master.detach(), 1 - min(0.998, (step + 1) / (step + 10)))
        if rank == 0 and (step % 200 == 0 or step in (1, 10)):
            print(f"step {step}, {time.time() - begun:.0f} s, {_decibels(mse):.2f} dB, rate {rate:.5f}", flush=True)
    if rank == 0:
        group_norm.use_stock(vae)
        vae = vae.float().to(memory_format=torch.contiguous_format).eval()
        flat.fill(list(vae.parameters()), average)
        vae.save_pretrained(work / "vae_raw")
        print(f"{step} steps, {_decibels(_error(vae, work)):.2f} dB on 16 pictures of the subset")
    dist.barrier()
    dist.destroy_process_group()


def _matrices(vae: AutoencoderKL) -> list[tuple[int, tuple[int, int]]]:
    """The convolutions inside blocks, as matrices: Muon moves them, AdamW the rest."""
    named = list(vae.named_parameters())
    places = flat.offsets([p for _, p in named])
    return [
        (offset, (p.shape[0], p[0].numel()))
        for (name, p), offset in zip(named, places, strict=False)
        if p.ndim == 4 and ("blocks" in name or "mid_block" in name)
    ]


def _agreed(done: float) -> float:
    """Rank 0's share of the time, on all ranks."""
    share = torch.tensor([done], dtype=torch.float64)
    dist.broadcast(share, 0)
    return float(share)


def _loss(vae: AutoencoderKL, x: torch.Tensor, sharp: bool) -> tuple[torch.Tensor, float]:
    """L1 + 2 MSE + half the L1 of differences between neighbours; and the MSE. x: [batch, 3, side, side]."""
    inputs = x.to(torch.bfloat16).to(memory_format=torch.channels_last)
    mean = vae.quant_conv(vae.encoder(inputs)).float()[:, :CHANNELS]
    latent = (mean + NOISE * torch.randn_like(mean)).to(torch.bfloat16).to(memory_format=torch.channels_last)
    y = vae.decoder(vae.post_quant_conv(latent)).float()
    mse = F.mse_loss(y, x)
    loss = (y - x).abs().mean() + 2 * mse + 1e-4 * mean.square().mean()
    if sharp:
        loss = loss + 0.5 * sum((y.diff(dim=dim) - x.diff(dim=dim)).abs().mean() for dim in (-2, -1))
    return loss, float(mse.detach())


class _Batches:
    """One random picture at a time, nine of ten from the subset, half of them mirrored."""

    def __init__(self, work: Path, rank: int) -> None:
        self.pictures, facts = pictures.load(work)
        self.subset = np.array(facts["subset"])
        self.random = np.random.default_rng(SEED + 100 + rank)

    def next(self, side: int) -> torch.Tensor:
        """[1, 3, side, side] in -1 to 1."""
        draw = self.random
        i = draw.choice(self.subset) if draw.random() < 0.9 else draw.integers(len(self.pictures))
        y, x = draw.integers(0, pictures.SIDE + 1 - side, 2)
        picture = self.pictures[i, y : y + side, x : x + side]
        if draw.random() < 0.5:
            picture = picture[:, ::-1]
        return pictures.to_tensor(picture[None])


@torch.no_grad()
def _error(vae: AutoencoderKL, work: Path) -> float:
    found, facts = pictures.load(work)
    chosen = [facts["subset"][i] for i in np.linspace(0, len(facts["subset"]) - 1, 16).astype(int)]
    x = pictures.to_tensor(found[chosen])
    return float(F.mse_loss(vae.decode(vae.encode(x).latent_dist.mean).sample.clamp(-1, 1), x))


def _decibels(mse: float) -> float:
    return 10 * math.log10(4 / mse)
