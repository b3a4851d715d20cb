"""What is timed: a Flux-shaped model of random weights behind the real pipeline call, and the processes that run it."""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

TEXT_TOKENS = 128
TEXT_WIDTH = 256
TRACED, TEXT_EACH = "traced", "text each"
"""Ways to run a plan: with a trace; with the text in every band of a stage pipeline."""
ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "DIFFUSERS_VERBOSITY": "error",
    "TRANSFORMERS_VERBOSITY": "error",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore::FutureWarning",
}
"""Of the processes that run requests; they inherit it, as some of it is read at import."""


@dataclass(frozen=True)
class Load:
    """Image tokens, transformer calls and text tokens of one request."""

    tokens: int
    calls: int
    text: int = TEXT_TOKENS


def pipeline(heads: int = 4) -> Any:
    """A stock FluxPipeline: 2 double and 6 single blocks, heads of 64, fp32, no text encoders."""
    import torch
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    torch.manual_seed(0)
    transformer = FluxTransformer2DModel(
        num_layers=2,
        num_single_layers=6,
        attention_head_dim=64,
        num_attention_heads=heads,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=64,
        axes_dims_rope=(8, 28, 28),
    )
    vae = AutoencoderKL(
        latent_channels=16,
        block_out_channels=(8,) * 4,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        norm_num_groups=4,
    )
    pipe = FluxPipeline(FlowMatchEulerDiscreteScheduler(), vae, None, None, None, None, transformer)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def request(load: Load, guided: bool) -> dict[str, Any]:
    """Call arguments. A guided request has half the steps, each with two transformer calls."""
    import torch

    random = torch.Generator().manual_seed(0)
    prompt, pooled = torch.randn(1, load.text, TEXT_WIDTH, generator=random), torch.randn(1, 64, generator=random)
    side = int(load.tokens**0.5) * 16
    call: dict[str, Any] = {
        "prompt_embeds": prompt,
        "pooled_prompt_embeds": pooled,
        "height": side,
        "width": side,
        "num_inference_steps": load.calls // (1 + guided),
        "guidance_scale": 1.0,
        "output_type": "latent",
        "generator": torch.Generator().manual_seed(1),
    }
    if guided:
        call |= {
            "true_cfg_scale": 3.0,
            "negative_prompt_embeds": prompt * 0.5,
            "negative_pooled_prompt_embeds": pooled * 0.5,
        }
    return call


def serve(line: Connection, rank: int, store: str, threads: int, peer: str | None) -> None:
    """One process: runs the cells that come over the line, each answered by (seconds, latents, events) or a traceback.

    Args:
        store: file where the two ranks of a world meet; empty for a process of its own.
        peer: degree of diffusers' own context parallelism to switch on, `ulysses_degree` or `ring_degree`.
    """
    import torch
    import torch.distributed as dist

    import ditpar
    from ditpar.methods import calls

    units = calls.units

    def every_unit_leads(*args: Any) -> tuple[Any, ...]:
        """What PipeFusion is elsewhere: the text is computed anew with each band."""
        return tuple(replace(unit, lead=True) for unit in units(*args))

    torch.set_num_threads(threads)
    try:
        if store:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        pipe = pipeline()
        if peer:
            _enable_peer(pipe, peer)
        line.send((0.0, None, None))  # ready
        while cell := line.recv():
            load, guided, plan, how = cell
            call = request(load, guided)
            if plan:
                ditpar.parallelize(pipe, plan)
                pipe._ditpar.traces = how == TRACED
            calls.units = units if how != TEXT_EACH else every_unit_leads
            began = time.perf_counter()
            latents = pipe(**call).images
            seconds = time.perf_counter() - began
            events = pipe._ditpar.events if how == TRACED else None
            if plan:
                ditpar.restore(pipe)
            line.send((seconds, latents.numpy(), events))
        if store:
            dist.destroy_process_group()
    except EOFError:
        return  # the parent has ended
    except Exception:  # noqa: BLE001  (whatever it is, the parent reports it)
        line.send(traceback.format_exc())


def _enable_peer(pipe: Any, degree: str) -> None:
    import torch
    from diffusers import ContextParallelConfig

    # It takes the rank modulo the number of accelerators, which is none here; this process serves nothing else.
    torch.accelerator.device_count = lambda: 1
    pipe.transformer.enable_parallelism(config=ContextParallelConfig(**{degree: 2}))
