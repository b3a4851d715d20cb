"""`ditpar trace`: what the ranks spent their time on."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ditpar.errors import RequestError
from ditpar.trace import mean, read, shares


def run(file: Path, as_json: bool) -> None:
    """Prints the shares of each rank and in total. Raises RequestError for a file that is no trace."""
    by_rank = read(file)
    try:
        ranks = shares(by_rank)
    except ValueError:
        raise RequestError(f"{file}: all events take no time") from None
    total = mean(ranks)
    ends = [t for events in by_rank for e in events for t in (e.begin, e.end)]
    seconds = (max(ends) - min(ends)) / 1e9
    if as_json:
        print(json.dumps({"seconds": seconds, "ranks": [asdict(s) for s in ranks], "total": asdict(total)}))
        return
    table = Table(title=f"{seconds:.3f} s", title_justify="left")
    for column in ("rank", "busy", "waiting", "idle"):
        table.add_column(column, justify="right")
    for rank, share in enumerate(ranks):
        table.add_row(str(rank), *(f"{part:.1%}" for part in asdict(share).values()), end_section=share is ranks[-1])
    table.add_row("total", *(f"{part:.1%}" for part in asdict(total).values()))
    Console().print(table)
