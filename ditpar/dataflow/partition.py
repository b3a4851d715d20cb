"""Row partitions: how tokens, heads or samples are shared out among ranks."""

from __future__ import annotations


def split(count: int, parts: int, last: bool = False) -> list[int]:
    """Sizes of `parts` consecutive pieces of `count`, as equal as can be; the larger ones first (or `last`)."""
    base, rest = divmod(count, parts)
    sizes = [base + (i < rest) for i in range(parts)]
    return sizes[::-1] if last else sizes


def start(sizes: list[int], index: int) -> int:
    """Where piece `index` begins."""
    return sum(sizes[:index])
