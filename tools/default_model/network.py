"""The networks that are trained together: a small Flux transformer, a CLIP and a T5 text encoder."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import FluxTransformer2DModel
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from default_model import tokens
from default_model.vae import CHANNELS

TEXT_WIDTH = 192


def build(work: Path, seed: int = 0) -> nn.ModuleDict:
    """`transformer` (13.07M parameters), `text_encoder` (0.87M) and `text_encoder_2` (1.02M), untrained."""
    torch.manual_seed(seed)
    clip, t5 = tokens.load(work)
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4 * CHANNELS,
        num_layers=2,
        num_single_layers=8,
        attention_head_dim=64,
        num_attention_heads=4,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=TEXT_WIDTH,
        guidance_embeds=False,
        axes_dims_rope=(8, 28, 28),
    )
    text_encoder = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(clip),
            hidden_size=TEXT_WIDTH,
            intermediate_size=2 * TEXT_WIDTH,
            projection_dim=TEXT_WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=tokens.LENGTH,
            hidden_act="quick_gelu",
            bos_token_id=clip.bos_token_id,
            eos_token_id=clip.eos_token_id,
            pad_token_id=clip.pad_token_id,
        )
    )
    text_encoder_2 = T5EncoderModel(
        T5Config(
            vocab_size=len(t5),
            d_model=TEXT_WIDTH,
            d_kv=48,
            d_ff=2 * TEXT_WIDTH,
            num_layers=2,
            num_heads=4,
            feed_forward_proj="gated-gelu",
            dropout_rate=0.0,
            pad_token_id=0,
            eos_token_id=1,
            decoder_start_token_id=0,
        )
    )
    with torch.no_grad():  # every block begins as the identity, and the output as 0 (DiT, arXiv 2212.09748)
        for name, parameter in transformer.named_parameters():
            if ("norm" in name and ".linear." in name) or name.startswith("proj_out"):
                parameter.zero_()
        text_encoder.get_input_embeddings().weight.normal_(0, 0.05)
        text_encoder_2.get_input_embeddings().weight.normal_(0, 1.0)
    return nn.ModuleDict({"transformer": transformer, "text_encoder": text_encoder, "text_encoder_2": text_encoder_2})


def pack(z: torch.Tensor) -> torch.Tensor:
    """[batch, channels, height, width] to [batch, height * width / 4, 4 * channels], as FluxPipeline packs."""
    b, c, h, w = z.shape
    return z.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(b, h * w // 4, c * 4)


def image_ids(side: int, scale: int = 1) -> torch.Tensor:
    """Positions [side * side, 3] of a square of tokens. Scale 2 lays a 128 pixel picture over the grid of 256 pixels."""
    grid = torch.arange(side).float() * scale + (scale - 1) / 2
    ids = torch.zeros(side, side, 3)
    ids[..., 1] = grid[:, None]
    ids[..., 2] = grid[None]
    return ids.view(-1, 3)
