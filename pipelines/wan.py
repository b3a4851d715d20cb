"""Wan 2.1 and 2.2 (one or two transformers, per-token timesteps): video tokens, text by cross-attention."""

from ditpar.family import Embed, Family, Guidance, Slice

FAMILY = Family(
    name="wan",
    transformer="WanTransformer3DModel",
    pipelines=("WanPipeline", "WanImageToVideoPipeline"),
    blocks=("blocks",),
    streams={"hidden_states": "image"},
    returns=("image",),
    joint=None,
    sites={"attn1": "image"},
    processors=("WanAttnProcessor",),
    slices=(
        Slice("rope", 0, 1, "image"),
        Slice("rope", 1, 1, "image"),
        Slice("condition_embedder", 0, 1, "image", ndim=3),
        Slice("condition_embedder", 1, 1, "image", ndim=3),
    ),
    exit="proj_out",
    batched=("hidden_states", "timestep", "encoder_hidden_states", "encoder_hidden_states_image"),
    static=("attention_kwargs",),
    output="latent",
    cfg=Guidance("separate", "guidance_scale"),
    embed=Embed("patch_embedding", 2),
    per_step=("condition_embedder",),
    per_request=(
        "rope",
        "blocks.*.attn2.to_k",
        "blocks.*.attn2.to_v",
        "blocks.*.attn2.add_k_proj",
        "blocks.*.attn2.add_v_proj",
    ),
    tiny={
        "num_attention_heads": 4,
        "attention_head_dim": 16,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 24,
        "freq_dim": 32,
        "ffn_dim": 96,
        "num_layers": 3,
        "rope_max_seq_len": 32,
    },
)
