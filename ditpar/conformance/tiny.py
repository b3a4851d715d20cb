"""Tiny random pipelines: stock diffusers classes, small enough to run in milliseconds."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import diffusers
import torch
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

from ditpar.conformance.inputs import inputs
from ditpar.conformance.weights import randomise
from ditpar.errors import ModelError
from ditpar.family import Family

__all__ = ["build", "inputs"]

LATENT_CHANNELS = 4
IMAGE_SIDE = 32
"""Pixels a side that the image encoder sees."""

_FLOW = ("FlowMatchEulerDiscreteScheduler", {"use_dynamic_shifting": True})
SCHEDULERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "flux": _FLOW,
    "qwenimage": _FLOW,
    "sd3": ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}),
    # A mild noise schedule: at the usual one a random model's first step is 300 times the noise, which hides positions.
    "pixart": ("DPMSolverMultistepScheduler", {"beta_end": 0.002}),
    "wan": (
        "UniPCMultistepScheduler",
        {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0},
    ),
}
"""The scheduler that a family's checkpoints ship, by family name; for others the one in the pipeline's signature."""


def build(
    family: Family,
    pipeline: str | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> Any:
    """A stock diffusers pipeline of the family with a tiny random transformer and VAE and no text encoders.

    Args:
        family: the record; its `tiny` is the transformer's config.
        pipeline: a pipeline class of diffusers; None takes the family's first.
        seed: all weights follow from it.
        dtype: of all weights, cast from the same fp32 values.
        overrides: changes to the transformer's config, or options of the pipeline's constructor
            (`expand_timesteps`, `boundary_ratio`; the latter adds a second transformer).

    Raises ModelError for an unknown class or option.
    """
    name = pipeline or family.pipelines[0]
    pipeline_class = _diffusers(name)
    parameters = inspect.signature(pipeline_class.__init__).parameters
    options = {key: overrides.pop(key) for key in list(overrides) if key in parameters}
    if name == "WanImageToVideoPipeline" and not options.get("expand_timesteps"):
        # Noise, the condition's latents and a mask over the 4 frames of a latent frame are stacked as channels.
        overrides.setdefault("in_channels", 2 * LATENT_CHANNELS + 4)
    config = {**family.tiny, **overrides}
    required = [key for key, p in parameters.items() if key != "self" and p.default is inspect.Parameter.empty]
    components: dict[str, Any] = dict.fromkeys(required)
    components["transformer"] = _model(family.transformer, config, seed)
    if options.get("boundary_ratio") is not None:
        components["transformer_2"] = _model(family.transformer, config, seed + 1)
    components["vae"] = _vae(parameters["vae"].annotation.__name__, name, seed + 2)
    if config.get("image_dim"):
        components["image_encoder"] = _image_encoder(config["image_dim"], seed + 3)
        components["image_processor"] = CLIPImageProcessor(
            size={"shortest_edge": IMAGE_SIDE}, crop_size={"height": IMAGE_SIDE, "width": IMAGE_SIDE}
        )
    scheduler, settings = SCHEDULERS.get(family.name) or _scheduler(parameters["scheduler"].annotation)
    components["scheduler"] = _diffusers(scheduler)(**settings)
    for component in components.values():
        if isinstance(component, torch.nn.Module):
            torch.nn.Module.to(component, dtype)  # ModelMixin.to warns of modules that it would keep in fp32
    pipe = pipeline_class(**components, **options)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _diffusers(name: str) -> Any:
    try:
        return getattr(diffusers, name)
    except AttributeError:
        raise ModelError(f"diffusers {diffusers.__version__} has no class {name}") from None


def _scheduler(annotation: Any) -> tuple[str, Mapping[str, Any]]:
    """The named class; DPM-Solver where any of the Karras family would do, or none is named."""
    named = inspect.isclass(annotation) and issubclass(annotation, diffusers.SchedulerMixin)
    return (annotation.__name__ if named else "DPMSolverMultistepScheduler"), {}


def _model(name: str, config: Mapping[str, Any], seed: int) -> torch.nn.Module:
    cls = _diffusers(name)
    unknown = set(config) - set(inspect.signature(cls.__init__).parameters)
    if unknown:
        raise ModelError(f"{name} has no config value {', '.join(sorted(unknown))}")
    with torch.random.fork_rng(devices=[]):
        model: torch.nn.Module = cls(**config)
    randomise(model, seed)
    return model.eval().requires_grad_(False)


def _image_encoder(width: int, seed: int) -> torch.nn.Module:
    """A CLIP vision model whose hidden states are 5 tokens of the given width."""
    config = CLIPVisionConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=IMAGE_SIDE,
        patch_size=IMAGE_SIDE // 2,
    )
    with torch.random.fork_rng(devices=[]):
        model = CLIPVisionModel(config)
    randomise(model, seed)
    return model.eval().requires_grad_(False)


def _vae(name: str, pipeline: str, seed: int) -> torch.nn.Module:
    """A tiny VAE that shrinks 8 times a side, as the real ones do (64 times for pipelines of the edit kind).

    Qwen-Image-Edit scales any reference image to a million pixels; at 8 times that would be 4096 reference tokens.
    """
    if name == "AutoencoderKL":
        levels = 4
        return _model(
            name,
            {
                "block_out_channels": (4,) * levels,
                "down_block_types": ("DownEncoderBlock2D",) * levels,
                "up_block_types": ("UpDecoderBlock2D",) * levels,
                "latent_channels": LATENT_CHANNELS,
                "norm_num_groups": 2,
                "scaling_factor": 0.5,
                "shift_factor": 0.1,
            },
            seed,
        )
    edit = pipeline.startswith("QwenImageEdit")
    downsample = [False] * 6 if edit else [False, True, True]
    return _model(
        name,
        {
            "base_dim": 2 if edit else 4,
            "z_dim": LATENT_CHANNELS,
            "dim_mult": [1] * (len(downsample) + 1),
            "num_res_blocks": 1,
            "temperal_downsample": downsample,
            "latents_mean": [0.1, -0.1, 0.2, 0.0],
            "latents_std": [1.0, 0.8, 1.2, 0.9],
        },
        seed,
    )
