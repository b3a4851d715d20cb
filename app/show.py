"""`ditpar show`: how an image was made."""

from __future__ import annotations

import json
from pathlib import Path

from ditpar.app.png import read_png


def run(file: Path, as_json: bool) -> None:
    """Prints the record of a PNG. Raises RequestError when it has none."""
    record = read_png(file)
    if as_json:
        print(json.dumps({**record.to_json(), "seed": record.seed}))
        return
    rows = {
        **record.request.to_json(),
        "seed": record.seed,
        "plan": str(record.plan),
        "model": record.model,
        **{f"{name} version": version for name, version in record.versions.items()},
    }
    extra = rows.pop("extra", {})
    rows.update(extra)
    if record.request.count > 1:
        rows["image"] = f"{record.index + 1} of {record.request.count} made in one call"
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:{width}}  {value}")
