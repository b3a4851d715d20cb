"""Model folders: what is checked before anything starts, and the sensible defaults that a model brings."""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ditpar.errors import ModelError
from ditpar.family import Family, family_of

DEFAULT_MODEL = Path(__file__).resolve().parent.parent / "models" / "emoji"
BUNDLED = "emoji"
"""The name under which the bundled model may be asked for, and is recorded."""
DEFAULTS_FILE = "ditpar.json"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class Model:
    """What can be known of a model without loading it.

    Attributes:
        name: what to call it, and to ask for it again: the folder in full, a hub id, or `emoji`.
        path: the folder, or the hub id.
        pipeline: class name of its diffusers pipeline.
        family: the record of its transformer.
        config: the transformer's config.
        defaults: call arguments for those that a request leaves out: `ditpar.json` over the family's.
        dtype: name of the dtype to load in, when the model states one.
        components: `library.Class` of each component by name; empty for one that the model goes without.
    """

    name: str
    path: str
    pipeline: str
    family: Family
    config: dict[str, Any]
    defaults: dict[str, Any]
    dtype: str | None
    components: dict[str, str]


def read_model(path_or_id: str | Path, given: Collection[str] = (), **hub: Any) -> Model:
    """Reads and checks a model. Raises ModelError naming the file at fault.

    `emoji` is the bundled model. Another name that is no folder is taken for a hub id, and looked up in the local hub
    cache or fetched, as diffusers does.

    Args:
        given: components that the caller brings, so that the folder need not have them.
        hub: arguments for the hub (revision, token, cache_dir, local_files_only).
    """
    name = str(path_or_id)
    folder = DEFAULT_MODEL if name == BUNDLED and not Path(name).exists() else Path(name)
    if folder.is_dir():
        check_model_folder(folder, given)
        path = str(folder.resolve())
        name = BUNDLED if folder.resolve() == DEFAULT_MODEL else path
    elif folder.is_absolute() or name.startswith(".") or name.count("/") != 1:
        raise ModelError(f"model: {name} is no folder and no hub id of the form owner/name")
    else:
        folder, path = _hub_folder(name, hub), name
    index = _json(folder / "model_index.json")
    if "transformer" not in index:
        raise ModelError(f"model: {folder / 'model_index.json'} has no transformer; ditpar runs diffusion transformers")
    family = family_of(str(index["transformer"][1]))
    return Model(
        name,
        path,
        str(index["_class_name"]),
        family,
        _json(folder / "transformer" / "config.json"),
        {**family.defaults, **defaults(folder)},
        _facts(folder).get("dtype"),
        {
            key: f"{value[0]}.{value[1]}" if value[0] in ("diffusers", "transformers") else ""
            for key, value in index.items()
            if not key.startswith("_") and isinstance(value, list)
        },
    )


def defaults(folder: str | Path) -> dict[str, Any]:
    """The call arguments in the folder's `ditpar.json`; none without one."""
    found = _facts(folder).get("defaults", {})
    if not isinstance(found, dict):
        raise ModelError(f"model: {Path(folder) / DEFAULTS_FILE}: defaults must be an object of call arguments")
    return found


def _facts(folder: str | Path) -> dict[str, Any]:
    file = Path(folder) / DEFAULTS_FILE
    return _json(file) if file.is_file() else {}


def check_model_folder(folder: str | Path, given: Collection[str] = ()) -> None:
    """Raises ModelError for a folder that lacks files, has truncated ones, or only pickled weights.

    Components in `given` are not looked at: the caller brings them.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ModelError(f"model: folder {folder} does not exist")
    index = _json(folder / "model_index.json")
    if not isinstance(index.get("_class_name"), str):
        raise ModelError(f"model: {folder / 'model_index.json'} names no pipeline class")
    for name, value in index.items():
        if name.startswith("_") or name in given or not isinstance(value, list) or value[0] is None:
            continue
        if not (folder / name).is_dir():
            raise ModelError(f"model: component folder {folder / name} is missing")
        _check_weights(folder / name)


def _check_weights(folder: Path) -> None:
    safe = sorted(folder.glob("*.safetensors"))
    for file in safe:
        _check_safetensors(file)
    for index in folder.glob("*.safetensors.index.json"):
        for part in sorted(set(_json(index).get("weight_map", {}).values())):
            if not (folder / part).is_file():
                raise ModelError(f"model: {folder / part}, named in {index.name}, is missing")
    pickled = [file.name for file in sorted(folder.iterdir()) if file.suffix in _PICKLED]
    if pickled and not safe:
        raise ModelError(
            f"model: {folder / pickled[0]} is a pickle, which can run code when it is loaded; convert it to safetensors "
            "(save_pretrained(..., safe_serialization=True))"
        )
    has_config = (folder / "config.json").is_file()
    if has_config and not safe:
        raise ModelError(f"model: {folder} has a config.json but no *.safetensors weights")


def _check_safetensors(file: Path) -> None:
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length)) if length < size else None
        if header is None:
            raise ValueError
        end = max((entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"), default=0)
    except (struct.error, ValueError, KeyError, TypeError):
        raise ModelError(f"model: {file} is no safetensors file, or its header is truncated") from None
    if 8 + length + end > size:
        raise ModelError(f"model: {file} is truncated: {size} bytes of {8 + length + end}")


def _json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text())
    except FileNotFoundError:
        raise ModelError(f"model: {file} is missing") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"model: {file} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"model: {file} must hold a JSON object")
    return value


def _hub_folder(name: str, hub: Mapping[str, Any]) -> Path:
    from huggingface_hub import snapshot_download

    files = ["model_index.json", "transformer/config.json", DEFAULTS_FILE]
    try:
        return Path(snapshot_download(name, allow_patterns=files, **hub))
    except Exception as error:  # offline, unknown, gated: the hub client fails in many ways
        raise ModelError(
            f"model: {name} is neither a folder nor a model that the hub or its cache has: {error}"
        ) from error
