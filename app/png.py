"""PNG metadata: how an image was made, as JSON for ditpar and in the text form that other tools read."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image, PngImagePlugin

from ditpar.errors import RequestError
from ditpar.plan import Plan
from ditpar.request import Request

KEY, TEXT_KEY = "ditpar", "parameters"
FORMAT = 1


@dataclass(frozen=True)
class Record:
    """How one image was made.

    Attributes:
        request: the engine call's request, with all defaults filled in.
        index: which of the call's images this is.
        plan: the plan that it ran under.
        model: folder or hub id.
        versions: of ditpar, torch and diffusers.
    """

    request: Request
    plan: Plan
    model: str
    index: int = 0
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def seed(self) -> int:
        return self.request.seeds[self.index]

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "request": self.request.to_json(),
            "index": self.index,
            "plan": str(self.plan),
            "model": self.model,
            "versions": self.versions,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Record:
        if data.get("format") != FORMAT:
            raise RequestError(f"metadata: format {data.get('format')} is not the {FORMAT} that this version reads")
        request = Request.from_json(data["request"])
        return cls(request, Plan.parse(data["plan"]), data["model"], data.get("index", 0), data.get("versions", {}))

    def to_text(self) -> str:
        """The one-paragraph form that web UIs write and read."""
        request = self.request
        facts = {
            "Steps": request.steps,
            "CFG scale": request.true_cfg if request.true_cfg is not None else request.guidance,
            "Seed": self.seed,
            "Size": f"{request.width}x{request.height}" if request.width and request.height else None,
            "Model": Path(self.model).name,
            "Version": f"ditpar {self.versions.get('ditpar', '')}".strip(),
        }
        lines = [request.prompt]
        if request.negative:
            lines.append(f"Negative prompt: {request.negative}")
        lines.append(", ".join(f"{name}: {value}" for name, value in facts.items() if value is not None))
        return "\n".join(lines)


def write_png(image: Image.Image, path: Path, record: Record) -> None:
    """Writes the image with its record. Whole or not at all: a temporary file beside it is renamed.

    Raises RequestError when the folder cannot be written to.
    """
    info = PngImagePlugin.PngInfo()
    info.add_itxt(KEY, json.dumps(record.to_json()))
    info.add_itxt(TEXT_KEY, record.to_text())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=".ditpar-", suffix=".png", dir=path.parent)
    except OSError as error:
        raise RequestError(f"out: {path.parent} cannot be written to: {error.strerror}") from None
    try:
        with os.fdopen(handle, "wb") as stream:
            image.save(stream, format="PNG", pnginfo=info)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_png(path: Path) -> Record:
    """The record of an image. Raises RequestError for files that are no PNG or have none."""
    try:
        with Image.open(path) as image:
            text = dict(getattr(image, "text", {}))
    except FileNotFoundError:
        raise RequestError(f"{path} does not exist") from None
    except OSError as error:
        raise RequestError(f"{path} is no readable image: {error}") from None
    if KEY not in text:
        raise RequestError(
            f"{path} has no ditpar metadata" + (" (only a text from another tool)" if TEXT_KEY in text else "")
        )
    try:
        return Record.from_json(json.loads(text[KEY]))
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"{path} has broken ditpar metadata: {error}") from None
