"""The multi-rank harness itself: results, faults of every kind, and that it comes back after each."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from world import RankError, World


@dataclass
class Parcel:
    """A class of this test file, which must pickle both ways."""

    tensor: torch.Tensor


def total(value: float) -> float:
    x = torch.tensor(value + dist.get_rank())
    dist.all_reduce(x)
    return x.item()


def double(parcel: Parcel) -> Parcel:
    return Parcel(parcel.tensor * 2)


def raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"broken on purpose on {rank}")
    dist.barrier()


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        asleep_on_purpose()


def asleep_on_purpose() -> None:
    time.sleep(1000)


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def stop_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGSTOP)


def threads() -> int:
    return torch.get_num_threads()


def pid() -> int:
    return os.getpid()


@pytest.mark.parametrize("world", [1, 2, 3], indirect=True)
def test_every_rank_answers(world: World) -> None:
    size = world.size
    assert world.run(total, 1.0) == [size + size * (size - 1) / 2] * size


def test_classes_of_the_test_file_travel(world: World) -> None:
    for parcel in world.run(double, Parcel(torch.ones(3))):
        assert isinstance(parcel, Parcel) and parcel.tensor.tolist() == [2, 2, 2]


def test_ranks_stay_up_between_cases(world: World) -> None:
    assert world.run(pid) == world.run(pid) == world.pids


def test_one_thread_a_rank(world: World) -> None:
    assert world.run(threads) == [1, 1]


def test_a_raise_names_the_rank_and_brings_its_traceback(world: World) -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1 of 2: Traceback.*in raise_on.*broken on purpose on 1"):
        world.run(raise_on, 1)
    assert world.run(total, 0.0) == [1, 1]


def test_a_hang_is_ended_with_stacks(world: World) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)rank 0 of 2: no answer after 1 s.*in asleep_on_purpose"):
        world.run(hang_on, 0, timeout=1)
    assert time.monotonic() - start < 10
    assert world.run(total, 0.0) == [1, 1]


def test_a_death_names_the_signal(world: World) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1 of 2: died: by SIGKILL"):
        world.run(die_on, 1)
    assert time.monotonic() - start < 10
    assert world.run(total, 0.0) == [1, 1]


def test_a_stopped_rank_is_ended(world: World) -> None:
    with pytest.raises(RankError, match=r"rank 0 of 2: no answer after 1 s"):
        world.run(stop_on, 0, timeout=1)
    assert world.run(total, 0.0) == [1, 1]


def test_nothing_is_left_behind() -> None:
    world = World(2)
    world.run(pid)
    left = world.pids
    world.close()
    for number in left:
        with pytest.raises(ProcessLookupError):
            os.kill(number, 0)


def test_a_local_function_is_refused(world: World) -> None:
    with pytest.raises(TypeError, match="module level"):
        world.run(lambda: None)
