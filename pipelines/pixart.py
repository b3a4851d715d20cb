"""PixArt-alpha and PixArt-Sigma: image tokens alone in self-attention, text by masked cross-attention."""

from ditpar.family import Embed, Family, Guidance

FAMILY = Family(
    name="pixart",
    transformer="PixArtTransformer2DModel",
    pipelines=("PixArtSigmaPipeline", "PixArtAlphaPipeline"),
    blocks=("transformer_blocks",),
    streams={"hidden_states": "image"},
    returns=("image",),
    joint=None,
    sites={"attn1": "image"},
    processors=("AttnProcessor2_0", "FusedAttnProcessor2_0"),
    exit="proj_out",
    batched=("hidden_states", "encoder_hidden_states", "timestep", "encoder_attention_mask", "added_cond_kwargs"),
    static=("cross_attention_kwargs",),
    output="latent",
    cfg=Guidance("batched", "guidance_scale"),
    embed=Embed("pos_embed.proj", 2),
    per_step=("adaln_single",),
    per_request=("caption_projection", "transformer_blocks.*.attn2.to_k", "transformer_blocks.*.attn2.to_v"),
    tiny={
        "sample_size": 16,
        "in_channels": 4,
        "out_channels": 8,
        "num_layers": 3,
        "attention_head_dim": 16,
        "num_attention_heads": 4,
        "cross_attention_dim": 64,
        "caption_channels": 24,
        "use_additional_conditions": False,
    },
)
