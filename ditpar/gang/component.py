"""A component of the pipeline as the caller sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ditpar.gang.pipeline import RemotePipeline


class RemoteModule:
    """A component that lives in the ranks. Its methods run there, on all ranks; its values are fetched from rank 0."""

    def __init__(self, pipe: RemotePipeline, path: tuple[str, ...]) -> None:
        vars(self).update(_pipe=pipe, _path=path)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._pipe._fetched((*self._path, name))

    def __setattr__(self, name: str, value: Any) -> None:
        self._pipe._run("set", (*self._path, name), value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._pipe._run("call", (*self._path, "__call__"), *args, **kwargs)

    def __repr__(self) -> str:
        return f"<{'.'.join(self._path)} in the ranks of {self._pipe!r}>"
