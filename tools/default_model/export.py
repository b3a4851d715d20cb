"""Stage 5: a checkpoint, the VAE and the tokenizers as a diffusers folder that FluxPipeline loads."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline

from default_model import flow, network, tokens

DEFAULTS = {
    "max_sequence_length": tokens.LENGTH,
    "true_cfg_scale": 3.0,
    "negative_prompt": "",
    "num_inference_steps": 24,
    "height": 256,
    "width": 256,
}


def export(work: Path, checkpoint: str, captions: list[str]) -> None:
    """Writes `model/`: weights in bf16, and `ditpar.json` with the defaults and the captions as prompts."""
    nets = network.build(work)
    flow.load_weights(nets, work / checkpoint)
    clip, t5 = tokens.load(work)
    pipe = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=1.0, use_dynamic_shifting=False),
        vae=AutoencoderKL.from_pretrained(work / "vae"),
        text_encoder=nets["text_encoder"].eval(),
        tokenizer=clip,
        text_encoder_2=nets["text_encoder_2"].eval(),
        tokenizer_2=t5,
        transformer=nets["transformer"].eval(),
    )
    folder = work / "model"
    pipe.to(torch.bfloat16).save_pretrained(folder, safe_serialization=True)
    facts = {"name": "ditpar emoji", "dtype": "float32", "defaults": DEFAULTS, "prompts": captions}
    (folder / "ditpar.json").write_text(json.dumps(facts, indent=2) + "\n")
