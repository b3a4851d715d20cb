"""Flux.1 (dev, schnell, Kontext): text and image in one joint sequence, text first."""

from ditpar.family import Embed, Family, Guidance, Slice

FAMILY = Family(
    name="flux",
    transformer="FluxTransformer2DModel",
    pipelines=("FluxPipeline", "FluxKontextPipeline", "FluxImg2ImgPipeline"),
    blocks=("transformer_blocks", "single_transformer_blocks"),
    streams={"hidden_states": "image", "encoder_hidden_states": "text"},
    returns=("text", "image"),
    joint="text_first",
    sites={"attn": "joint"},
    processors=("FluxAttnProcessor",),
    slices=(Slice("pos_embed", 0, 0, "joint"), Slice("pos_embed", 1, 0, "joint")),
    exit="proj_out",
    batched=("hidden_states", "encoder_hidden_states", "pooled_projections", "timestep", "guidance"),
    static=("img_ids", "txt_ids", "joint_attention_kwargs"),
    output="tokens",
    cfg=Guidance("separate", "true_cfg_scale", needs_negative=True),
    embed=Embed("x_embedder", 1),
    per_step=(
        "time_text_embed",
        "transformer_blocks.*.norm1.linear",
        "transformer_blocks.*.norm1_context.linear",
        "single_transformer_blocks.*.norm.linear",
        "norm_out.linear",
    ),
    per_request=("context_embedder", "pos_embed"),
    text=(
        "norm1_context",
        "norm2_context",
        "ff_context",
        "attn.add_q_proj",
        "attn.add_k_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
    ),
    tiny={
        "in_channels": 16,
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 4,
        "joint_attention_dim": 24,
        "pooled_projection_dim": 20,
        "axes_dims_rope": (4, 6, 6),
    },
)
