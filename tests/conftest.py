"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from world import World, Worlds

torch.set_num_threads(1)  # the machine is shared; and one thread makes results independent of its size


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """`worlds(3)` is a world of three ranks, shared by the whole session."""
    every = Worlds()
    yield every
    every.close()


@pytest.fixture
def world(request: pytest.FixtureRequest, worlds: Worlds) -> World:
    """A world of 2 ranks, or of `@pytest.mark.parametrize("world", [2, 3], indirect=True)`."""
    return worlds(getattr(request, "param", 2))
