"""`conform(name)`: proves a family record on tiny random models, one claim after the other, in this process alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ditpar.conformance import claims_attention, claims_calls, claims_rows, claims_structure, claims_units
from ditpar.conformance.report import FalseClaim, NoClaim, Report, Result, Status
from ditpar.conformance.subject import Subject
from ditpar.conformance.variants import variants
from ditpar.errors import ModelError
from ditpar.family import Family, families, family_of


@dataclass(frozen=True)
class Claim:
    """One kind of claim.

    Attributes:
        name: the record's field, mostly.
        proof: returns how it was proved; raises FalseClaim or NoClaim.
        needs: claims that the proof builds on; it is left open when one of them is not proved.
    """

    name: str
    proof: Callable[[Subject], str]
    needs: tuple[str, ...] = ()


CLAIMS = (
    Claim("pipelines", claims_calls.pipelines),
    Claim("arguments", claims_calls.arguments, ("pipelines",)),
    Claim("cfg", claims_calls.guidance, ("pipelines",)),
    Claim("batch", claims_calls.batch, ("arguments", "cfg")),
    Claim("blocks", claims_structure.blocks),
    Claim("streams", claims_structure.streams, ("blocks",)),
    Claim("stages", claims_structure.stages, ("streams",)),
    Claim("exit", claims_structure.exit_module, ("blocks",)),
    Claim("output", claims_calls.output, ("exit",)),
    Claim("sites", claims_attention.sites, ("streams",)),
    Claim("joint", claims_attention.joint, ("sites",)),
    Claim("slices", claims_rows.slices, ("joint", "exit")),
    Claim("heads_key", claims_attention.heads, ("sites",)),
    Claim("processors", claims_attention.processors, ("sites",)),
    Claim("masks", claims_calls.masks, ("arguments", "sites")),
    Claim("layers_keys", claims_units.layers, ("blocks",)),
    Claim("embed", claims_units.embed, ("output",)),
    Claim("once", claims_units.once, ("blocks",)),
    Claim("text", claims_units.text, ("joint",)),
    Claim("paths", claims_attention.paths, ("sites",)),
)
"""In the order of proof."""


def prove(subject: Subject) -> list[Result]:
    """Every claim on one variant."""
    results: list[Result] = []
    unproved: set[str] = set()
    for claim in CLAIMS:
        status: Status
        if missing := [name for name in claim.needs if name in unproved]:
            status, detail = "open", f"needs {', '.join(missing)}"
        else:
            try:
                status, detail = "proved", claim.proof(subject)
            except NoClaim as reason:
                status, detail = "none", str(reason)
            except FalseClaim as reason:
                status, detail = "false", str(reason)
        if status in ("false", "open"):
            unproved.add(claim.name)
        results.append(Result(claim.name, subject.variant.name, status, detail))
    return results


def conform(name: str | Family, variant: str | None = None) -> Report:
    """Proves each claim of a record on each of its family's variants.

    Args:
        name: family name, transformer class name, or a record.
        variant: only the variant of this name.

    Raises ModelError when there is no such record or variant, or when a tiny model of it cannot be built.
    """
    family = name if isinstance(name, Family) else families().get(name) or family_of(name)
    chosen = [each for each in variants(family) if variant in (None, each.name)]
    if not chosen:
        known = ", ".join(each.name for each in variants(family))
        raise ModelError(f"{family.name} has no variant {variant}; its variants are {known}")
    results: list[Result] = []
    for each in chosen:
        results += prove(Subject.of(family, each))
    return Report(family.name, family.transformer, tuple(results))
