"""Qwen-Image and Qwen-Image-Edit: joint attention, text first, key mask over the text tokens."""

from ditpar.family import Family, Guidance, Slice

FAMILY = Family(
    name="qwenimage",
    transformer="QwenImageTransformer2DModel",
    pipelines=("QwenImagePipeline", "QwenImageEditPipeline", "QwenImageEditPlusPipeline"),
    blocks=("transformer_blocks",),
    streams={"hidden_states": "image", "encoder_hidden_states": "text"},
    returns=("text", "image"),
    joint="text_first",
    sites={"attn": "joint"},
    processors=("QwenDoubleStreamAttnProcessor2_0",),
    slices=(
        Slice("pos_embed", 0, 0, "image"),
        Slice("pos_embed", 1, 0, "text"),
        Slice("block", "encoder_hidden_states_mask", 1, "text"),
        Slice("block", "modulate_index", 1, "image"),
    ),
    exit="proj_out",
    batched=(
        "hidden_states",
        "encoder_hidden_states",
        "encoder_hidden_states_mask",
        "timestep",
        "img_shapes",
        "guidance",
        "additional_t_cond",
    ),
    static=("attention_kwargs",),
    output="tokens",
    cfg=Guidance("separate", "true_cfg_scale", needs_negative=True),
    tiny={
        "in_channels": 16,
        "out_channels": 4,
        "num_layers": 3,
        "attention_head_dim": 16,
        "num_attention_heads": 4,
        "joint_attention_dim": 24,
        "axes_dims_rope": (4, 6, 6),
    },
)
