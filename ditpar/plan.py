"""Plan: how many ranks work along which mesh axis. One frozen value from UI to engine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from ditpar.errors import PlanError
from ditpar.family import Family

AXES = ("data", "cfg", "step", "pipe", "displaced", "ring", "ulysses", "tensor")
"""Mesh axes, outermost first: outer axes move one latent a step, inner ones activations every layer."""

NOT_BUILT = {
    "step": "step reuse (ParaStep)",
    "displaced": "displaced patches (DistriFusion)",
    "tensor": "tensor parallelism",
}
COMPONENTS = ("all", "rank0")
MAX_PATCHES = 64
"""Bands of a step: beyond, senders could be further ahead than what a link holds."""
OF_PIPE = ("patches", "warmup", "split")


@dataclass(frozen=True)
class Plan:
    """Degrees of parallelism per mesh axis (default 1) and options.

    Text form: `cfg=2,ulysses=2`; the empty plan prints as `single`. `components` says who holds text encoders and
    VAE: `all` ranks (the default where memory is plenty) or `rank0` alone; either way they *run* on one rank.

    For `pipe` (PipeFusion): `patches` is the number of bands that a step is cut into (0: as many as stages, or as there
    are rows), `warmup` the number of first steps that run whole and exact, `split` how many blocks each stage has
    (`10/9`; balanced by estimated cost without it).
    """

    data: int = 1
    cfg: int = 1
    step: int = 1
    pipe: int = 1
    displaced: int = 1
    ring: int = 1
    ulysses: int = 1
    tensor: int = 1
    components: str = "all"
    patches: int = 0
    warmup: int = 1
    split: str = ""

    def __post_init__(self) -> None:
        for axis in AXES:
            degree = getattr(self, axis)
            if isinstance(degree, bool) or not isinstance(degree, int) or degree < 1:
                raise PlanError(f"plan: {axis}={degree!r} must be a whole number of at least 1")
        if self.components not in COMPONENTS:
            raise PlanError(f"plan: components={self.components!r} must be one of {', '.join(COMPONENTS)}")
        for name, least in (("patches", 0), ("warmup", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                why = ": the first patched step would use keys and values that no step has computed" * (
                    name == "warmup"
                )
                raise PlanError(f"plan: {name}={value!r} must be a whole number of at least 1{why}")
        if self.patches > MAX_PATCHES:
            raise PlanError(f"plan: patches={self.patches} must be at most {MAX_PATCHES}")
        if self.split and not all(n.isdecimal() and int(n) > 0 for n in self.split.split("/")):
            raise PlanError(f"plan: split={self.split!r} must be numbers of blocks like 10/9, one for each stage")
        if self.pipe == 1:
            for f in fields(self):
                if f.name in OF_PIPE and getattr(self, f.name) != f.default:
                    raise PlanError(
                        f"plan: {f.name}={getattr(self, f.name)} needs a stage pipeline; add pipe=2 or leave it out"
                    )

    @classmethod
    def parse(cls, text: str | Plan) -> Plan:
        """`Plan.parse("cfg=2,ulysses=2")`. Raises PlanError for unknown keys, repeats and values that are no degrees."""
        if isinstance(text, Plan):
            return text
        names = [f.name for f in fields(cls)]
        values: dict[str, Any] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            if part == "single":
                continue
            key, equals, value = (s.strip() for s in part.partition("="))
            if not equals or key not in names:
                raise PlanError(f"plan: {part!r} is not one of {', '.join(f'{n}=N' for n in names)}")
            if key in values:
                raise PlanError(f"plan: {key} is given twice in {text!r}")
            if key in (*AXES, "patches", "warmup"):
                if not value.isdecimal():
                    raise PlanError(f"plan: {key}={value} must be a whole number of at least 1")
                values[key] = int(value)
            else:
                values[key] = value
        return cls(**values)

    def __str__(self) -> str:
        parts = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default]
        return ",".join(parts) or "single"

    @property
    def degrees(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def world(self) -> int:
        """The number of ranks that the plan needs: the product of its degrees."""
        return math.prod(self.degrees.values())

    def coordinate(self, axis: str, rank: int) -> int:
        """Where a rank is along an axis: ranks are laid out with the last axis varying fastest."""
        inner = math.prod(getattr(self, a) for a in AXES[AXES.index(axis) + 1 :])
        return rank // inner % int(getattr(self, axis))

    @property
    def sequence(self) -> int:
        """Ranks that share one token sequence (ring x ulysses)."""
        return self.ring * self.ulysses

    def validate(
        self,
        family: Family,
        config: Mapping[str, Any],
        call: Mapping[str, Any] | None = None,
        world: int | None = None,
        memory: int | None = None,
    ) -> None:
        """Refuses, by name and with what would work, a plan that cannot be right.

        Args:
            family: the facts of the model's family.
            config: the transformer's config (for its number of heads and its width).
            call: keyword arguments of the pipeline call, defaults included; None checks only what needs no request.
            world: ranks at hand; None when the plan chooses.
            memory: bytes free on a rank's device, for the attention exchange buffers; None skips that check.
        """
        for axis, what in NOT_BUILT.items():
            if getattr(self, axis) > 1:
                raise PlanError(
                    f"plan: {axis}={getattr(self, axis)}: {what} is not built yet; {self._instead(family, config)}"
                )
        if world is not None and world != self.world:
            raise PlanError(
                f"plan: {self} needs {self.world} rank{'s' * (self.world > 1)} but there are {world}; "
                f"{self._instead(family, config, world)}"
            )
        heads = family.heads(config)
        if self.ulysses > heads:
            raise PlanError(
                f"plan: ulysses={self.ulysses} exceeds the model's {heads} attention heads; "
                f"use ulysses={heads} at most, and ring for the rest"
            )
        if self.sequence * self.pipe > 1 and not family.sites:
            raise PlanError(f"plan: ring, ulysses and pipe are not supported by family {family.name}; use cfg or data")
        if self.pipe > 1 and self.pipe > family.layers(config):
            raise PlanError(
                f"plan: pipe={self.pipe} exceeds the model's {family.layers(config)} blocks; "
                f"use pipe={family.layers(config)} at most"
            )
        if self.cfg > 2:
            raise PlanError(f"plan: cfg={self.cfg}: there are two branches (with and without the prompt); use cfg=2")
        if call is not None:
            self._validate_call(family, config, call, memory)

    def _validate_call(
        self, family: Family, config: Mapping[str, Any], call: Mapping[str, Any], memory: int | None
    ) -> None:
        if self.cfg > 1 and not family.cfg.active(call):
            raise PlanError(
                f"plan: cfg=2 needs a request with classifier-free guidance; {family.cfg.advice}, "
                f"or use {replace(self, cfg=1, ulysses=self.ulysses * 2)}"
            )
        batch = family.batch(call)
        if self.data > 1 and batch < self.data:
            raise PlanError(
                f"plan: data={self.data} needs at least {self.data} images in one call but this call makes {batch}; "
                "raise num_images_per_prompt (or --count), or use cfg or ulysses"
            )
        if memory is not None and self.sequence * self.pipe > 1:
            need = self._kept_bytes(family, config, call)
            if need is not None and need > memory:
                more = "more stages, " if self.pipe > 1 else ""
                raise PlanError(
                    f"plan: {self} holds {need >> 20} MiB of keys and values a rank but only {memory >> 20} MiB are "
                    f"free; use {more}more ulysses ranks or a smaller size"
                )

    def _kept_bytes(self, family: Family, config: Mapping[str, Any], call: Mapping[str, Any]) -> int | None:
        """Keys and values that a rank holds at once: of one site, or of all of a stage's blocks and branches."""
        ring = self.ring if self.pipe == 1 else 1  # a stage holds all rows
        site = family.exchange_bytes(config, call, ring, self.ulysses, self.cfg, self.data)
        if site is None or self.pipe == 1:
            return site
        separate = family.cfg.style == "separate" and family.cfg.active(call) and self.cfg == 1
        return site * -(-family.layers(config) // self.pipe) * (1 + separate)

    def _instead(self, family: Family, config: Mapping[str, Any], world: int | None = None) -> str:
        try:
            return f"plan {auto(family, config, None, world or self.world)} works"
        except PlanError as error:
            return str(error)


def auto(family: Family, config: Mapping[str, Any], call: Mapping[str, Any] | None, ranks: int) -> Plan:
    """The plan for `ranks` ranks by a short rule: cfg first when the request has it, then ulysses by heads, then ring.

    `call` None means an unknown request, for which cfg is left out.
    """
    cfg = 2 if call is not None and ranks % 2 == 0 and family.cfg.active(call) else 1
    rest = ranks // cfg
    if rest > 1 and not family.sites:
        raise PlanError(f"plan: no plan of family {family.name} uses {ranks} ranks for this request")
    heads = family.heads(config)
    ulysses = max((u for u in range(1, rest + 1) if rest % u == 0 and heads % u == 0), default=1)
    return Plan(cfg=cfg, ulysses=ulysses, ring=rest // ulysses)
