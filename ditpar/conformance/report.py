"""What the conformance kit found: one result per claim and variant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["proved", "false", "open", "none"]
MARKS: dict[Status, str] = {"proved": "yes", "false": "FALSE", "open": "?", "none": "-"}


class FalseClaim(Exception):
    """A claim of a family record that the model contradicts; the message says how."""


class NoClaim(Exception):
    """The record claims nothing here (no masks, no text stream); the message says why."""


@dataclass(frozen=True)
class Result:
    """One claim on one variant.

    Attributes:
        status: `proved`; `false`; `open` when a claim that it builds on is not proved; `none` for nothing to prove.
        detail: how it was proved, or what is wrong.
    """

    claim: str
    variant: str
    status: Status
    detail: str


@dataclass(frozen=True)
class Report:
    """All results of one family record."""

    family: str
    transformer: str
    results: tuple[Result, ...]

    @property
    def ok(self) -> bool:
        """Whether every claim is proved."""
        return all(r.status in ("proved", "none") for r in self.results)

    @property
    def false(self) -> tuple[Result, ...]:
        """The results that contradict the record."""
        return tuple(r for r in self.results if r.status == "false")

    def to_json(self) -> dict[str, Any]:
        return {
            "family": self.family,
            "transformer": self.transformer,
            "ok": self.ok,
            "results": [vars(r) for r in self.results],
        }

    def table(self) -> list[list[str]]:
        """Header and rows: a claim a row, a variant a column."""
        variants = list(dict.fromkeys(r.variant for r in self.results))
        cells = {(r.claim, r.variant): MARKS[r.status] for r in self.results}
        claims = dict.fromkeys(r.claim for r in self.results)
        return [["claim", *variants], *([claim, *(cells.get((claim, v), "") for v in variants)] for claim in claims)]

    def __str__(self) -> str:
        table = self.table()
        widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
        ]
        lines += [f"FALSE  {r.claim} ({r.variant}): {r.detail}" for r in self.false]
        verdict = "every claim is proved" if self.ok else f"not proved: {len(self.false)} false"
        return "\n".join([f"{self.family} ({self.transformer})", *lines, verdict])
