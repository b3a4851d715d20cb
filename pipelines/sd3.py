"""Stable Diffusion 3 and 3.5: joint attention, image first; 3.5 adds image-only attention in some blocks."""

from ditpar.family import Embed, Family, Guidance

FAMILY = Family(
    name="sd3",
    transformer="SD3Transformer2DModel",
    pipelines=("StableDiffusion3Pipeline", "StableDiffusion3Img2ImgPipeline"),
    blocks=("transformer_blocks",),
    streams={"hidden_states": "image", "encoder_hidden_states": "text"},
    returns=("text", "image"),
    joint="image_first",
    sites={"attn": "joint", "attn2": "image"},
    processors=("JointAttnProcessor2_0", "FusedJointAttnProcessor2_0"),
    exit="proj_out",
    batched=("hidden_states", "encoder_hidden_states", "pooled_projections", "timestep"),
    static=("joint_attention_kwargs", "skip_layers"),
    output="latent",
    cfg=Guidance("batched", "guidance_scale"),
    embed=Embed("pos_embed.proj", 2),
    per_step=(
        "time_text_embed",
        "transformer_blocks.*.norm1.linear",
        "transformer_blocks.*.norm1_context.linear",
        "norm_out.linear",
    ),
    per_request=("context_embedder",),
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
        "sample_size": 16,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 3,
        "attention_head_dim": 16,
        "num_attention_heads": 4,
        "joint_attention_dim": 24,
        "caption_projection_dim": 64,
        "pooled_projection_dim": 20,
        "pos_embed_max_size": 24,
    },
)
