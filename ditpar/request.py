"""Request: what to generate. One frozen value from UI to engine."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from ditpar.errors import RequestError

NAMES = {
    "prompt": "prompt",
    "negative": "negative_prompt",
    "width": "width",
    "height": "height",
    "steps": "num_inference_steps",
    "guidance": "guidance_scale",
    "true_cfg": "true_cfg_scale",
}
"""Field of a Request -> argument of a diffusers pipeline."""
MAX_SIDE, MAX_STEPS, MAX_COUNT, MAX_PROMPT = 16384, 10_000, 10_000, 20_000
MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class Request:
    """One generation. None leaves a value to the model's defaults.

    Attributes:
        prompt, negative: texts of at most 20,000 characters.
        width, height: pixels, a multiple of 8, 8 to 16384.
        steps: denoising steps, 1 to 10000.
        guidance: `guidance_scale` (batched CFG, or the embedded scale of distilled models).
        true_cfg: `true_cfg_scale` (guidance by a second call).
        seed: 0 to 2**63-1; image i of the request has seed + i.
        count: images, at least 1.
        extra: further pipeline arguments, JSON values only.
    """

    prompt: str
    negative: str | None = None
    width: int | None = None
    height: int | None = None
    steps: int | None = None
    guidance: float | None = None
    true_cfg: float | None = None
    seed: int = field(default_factory=lambda: secrets.randbelow(2**32))
    count: int = 1
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, str) or not self.prompt.strip():
            raise RequestError("prompt must not be empty")
        for name in ("prompt", "negative"):
            text = getattr(self, name)
            if text is not None and (not isinstance(text, str) or len(text) > MAX_PROMPT):
                raise RequestError(f"{name} must be text of at most {MAX_PROMPT} characters")
        for name in ("width", "height"):
            side = getattr(self, name)
            if side is not None and (not _whole(side) or not 8 <= side <= MAX_SIDE or side % 8):
                raise RequestError(f"{name}={side} must be a multiple of 8 from 8 to {MAX_SIDE} pixels")
        self._range("steps", 1, MAX_STEPS)
        self._range("count", 1, MAX_COUNT)
        self._range("seed", 0, MAX_SEED - self.count)
        for name in ("guidance", "true_cfg"):
            scale = getattr(self, name)
            if scale is not None and not (isinstance(scale, int | float) and 0 <= scale <= 1000):
                raise RequestError(f"{name}={scale} must be a number from 0 to 1000")
        for key in self.extra:
            if key in {*NAMES.values(), "generator", "num_images_per_prompt"}:
                field_name = next((f for f, n in NAMES.items() if n == key), "seed or count")
                raise RequestError(f"extra: {key} has a field of its own, {field_name}")
        try:
            object.__setattr__(self, "extra", json.loads(json.dumps(dict(self.extra))))
        except (TypeError, ValueError) as error:
            raise RequestError(f"extra must hold JSON values: {error}") from None

    def _range(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if value is not None and (not _whole(value) or not low <= value <= high):
            raise RequestError(f"{name}={value} must be a whole number from {low} to {high}")

    def call(self, *defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments for the pipeline, without the generator. Later `defaults` yield to earlier ones."""
        call: dict[str, Any] = {}
        for layer in reversed(defaults):
            call.update(layer)
        call.update(self.extra)
        call.update({name: getattr(self, f) for f, name in NAMES.items() if getattr(self, f) is not None})
        if self.count > 1:
            call["num_images_per_prompt"] = self.count
        return call

    @property
    def seeds(self) -> list[int]:
        return [self.seed + i for i in range(self.count)]

    def single(self, index: int) -> Request:
        """Image `index` of this request as a request of its own."""
        return replace(self, seed=self.seed + index, count=1)

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value not in (None, {})}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Request:
        unknown = set(data) - {f.name for f in fields(cls)}
        if unknown:
            raise RequestError(f"request: unknown field {', '.join(sorted(unknown))}")
        if "prompt" not in data:
            raise RequestError("request: prompt is missing")
        return cls(**data)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
