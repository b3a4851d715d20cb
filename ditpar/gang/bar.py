"""The progress bar, drawn in the caller's process from what rank 0 tells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Bar:
    """The bar of one call. `draw(total=...)` makes a new one, as the stock pipeline does."""

    def __init__(self, draw: Callable[..., Any]) -> None:
        self.draw = draw
        self.drawn: Any = None

    def told(self, what: str, value: Any) -> None:
        """`total` begins a bar, `steps` moves it on to a count, `end` ends it."""
        if what == "total":
            self.close()
            self.drawn = self.draw(total=value) if value is not None else None
        elif what == "steps" and self.drawn is not None:
            self.drawn.update(value - self.drawn.n)
        elif what == "end":
            self.close()

    def close(self) -> None:
        if self.drawn is not None:
            self.drawn.close()
            self.drawn = None
