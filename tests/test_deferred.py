"""Deferred tensors one at a time: reading them, writing to them, and what makes the pending calls run."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from banded import cuts
from torch import Tensor

from ditpar.dataflow.deferred import Captured, Deferred, NotReady, resolve
from ditpar.dataflow.flow import Flow
from ditpar.errors import StaleError


class Calls:
    """A flow whose calls give what they were told."""

    def __init__(self, **options: Any) -> None:
        self.flow = Flow(self.run, **options)
        self.waiting: list[tuple[Deferred, Tensor]] = []
        self.runs = 0

    def call(self, value: Tensor) -> Deferred:
        deferred = self.flow.call(torch.empty_like(value, device="meta"), value.device, 1)
        self.waiting.append((deferred, value.clone()))
        return deferred

    def run(self) -> None:
        self.runs += 1
        for deferred, value in self.waiting:
            for lo, hi in cuts(value.shape[1]):
                deferred.fill(lo, hi, value[:, lo:hi].clone())
        self.waiting = []
        self.flow.ran()


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture
def value() -> Tensor:
    return torch.arange(24.0).view(2, 6, 2)


def saved(t: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(t, file)
    file.seek(0)
    return torch.load(file)


READS: dict[str, Callable[[Tensor], Any]] = {
    "numpy": lambda t: t.numpy().tolist(),
    "tolist": lambda t: t.tolist(),
    "__array__": lambda t: np.asarray(t).tolist(),
    "__dlpack__": lambda t: torch.utils.dlpack.from_dlpack(t.__dlpack__()),
    "untyped_storage": lambda t: t.untyped_storage().tolist(),
    "data_ptr": lambda t: t.data_ptr() != 0,
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "deepcopy": copy.deepcopy,
    "aten.sum.default": lambda t: t.sum().item(),
    "aten._local_scalar_dense.default": lambda t: t[:1, :1, 1:].item(),
    "aten.select.int": lambda t: t[0, 2].tolist(),
    "aten.unbind.int": lambda t: [row.tolist() for row in t[0]],
    "aten.equal.default": lambda t: torch.equal(t, t + 0),
    "aten.max.default": lambda t: bool(t.max() > 3),
    "aten.nonzero.default": lambda t: torch.nonzero(t).tolist(),
    "aten.unique_consecutive.default": lambda t: torch.unique_consecutive(t).tolist(),
}
"""Ways to look at a value, by what is counted for them."""


@pytest.mark.parametrize("how", READS)
def test_reading_runs_what_is_pending_once(calls: Calls, value: Tensor, how: str) -> None:
    deferred = calls.call(value)
    got, want = READS[how](deferred), READS[how](value)
    assert torch.equal(got, want) if isinstance(want, Tensor) else got == want
    assert type(got) is type(want) and calls.runs == 1
    READS[how](deferred)
    line = READS[how].__code__.co_firstlineno if how != "deepcopy" else None
    ((what, place), count) = next(iter(calls.flow.forced.items()))
    assert what == how and count == 1
    assert line is None or place == f"test_deferred.py:{line} <lambda>"


def test_more_ways_to_read(calls: Calls, value: Tensor) -> None:
    for read in (saved, copy.copy, lambda t: t.data, lambda t: t.cpu().float(), lambda t: torch.tensor(t.tolist())):
        deferred = calls.call(value)
        assert torch.equal(resolve(read(deferred)), value)
    assert f"{calls.call(value)[0, 0, 1:2].sum():.1f}" == "1.0"
    assert "pending=True" in repr(calls.call(value))


def test_row_local_operations_wait_and_come_band_by_band(calls: Calls, value: Tensor) -> None:
    deferred = calls.call(value)
    made = torch.cat([deferred * 2 + 1, value], dim=-1)[:, 1:]
    assert isinstance(made, Deferred) and made.pending and made.row == 1
    with pytest.raises(NotReady):
        made.band(0, 1)
    deferred.fill(0, 3, value[:, :3].clone())
    want = torch.cat([value * 2 + 1, value], dim=-1)[:, 1:]
    assert torch.equal(made.band(0, 2), want[:, :2])
    with pytest.raises(NotReady):
        made.band(1, 4)
    assert made.band(4, 4).shape == (2, 0, 4)
    deferred.fill(3, 6, value[:, 3:].clone())
    assert torch.equal(made.band(1, 4), want[:, 1:4]) and calls.runs == 0


def test_a_result_that_is_not_as_promised(calls: Calls, value: Tensor) -> None:
    deferred = calls.call(value)
    with pytest.raises(AssertionError, match=r"promised \[2, 2, 2\] torch.float32, gave \[2, 3, 2\].* for rows 0 to 2"):
        deferred.fill(0, 2, value[:, :3])
    with pytest.raises(AssertionError, match="float64"):
        deferred.fill(0, 2, value[:, :2].double())


def test_writing_in_place_waits_where_no_view_sees_it(calls: Calls, value: Tensor) -> None:
    deferred = calls.call(value)
    before = deferred + 0
    same = deferred
    deferred += 1
    deferred.mul_(value)
    assert deferred is same and not calls.flow.forced
    assert torch.equal(resolve(deferred), (value + 1) * value) and torch.equal(resolve(before), value)


def test_writing_in_place_is_seen_by_views(calls: Calls, value: Tensor) -> None:
    deferred = calls.call(value)
    view, double = deferred[:, 1:], deferred * 2
    view.mul_(3)
    assert torch.equal(resolve(double), value * 2)
    value[:, 1:] *= 3
    assert torch.equal(resolve(deferred), value) and torch.equal(resolve(view), value[:, 1:])
    assert [what for what, _ in calls.flow.forced] == ["aten.mul_.Tensor"]


def test_a_view_of_a_known_value_shares_its_memory(calls: Calls, value: Tensor) -> None:
    deferred = calls.call(value)
    for view in (deferred[:, ::2], deferred.unfold(1, 2, 2), deferred[0]):  # the first two cross rows
        view.add_(1)
    value[:, ::2] += 1
    value += 1
    value[0] += 1
    assert torch.equal(resolve(deferred), value)


def test_writes_between_keep_what_later_calls_need(calls: Calls, value: Tensor) -> None:
    first = calls.call(value)
    second = calls.call(value * 10)
    both = first + second
    for lo, hi in cuts(6):
        first.fill(lo, hi, value[:, lo:hi].clone())
    calls.flow.done = 1  # as a method that runs calls one by one would say
    known = first.value()
    known.zero_()
    assert torch.equal(resolve(both), value * 11)


def test_a_shape_cannot_be_written(calls: Calls, value: Tensor) -> None:
    with pytest.raises(NotImplementedError, match=r"keeps its shape: write x = x.unsqueeze\(...\), not"):
        calls.call(value).unsqueeze_(0)
    with pytest.raises(NotImplementedError, match="keeps its shape"):
        torch.add(value[:1], 1, out=calls.call(value))


def test_an_operand_that_was_changed_is_refused(calls: Calls, value: Tensor) -> None:
    other = value.clone()
    made = calls.call(value) + other
    other.view(-1)[0] = 5  # no deferred tensor takes part: nothing can tell the flow
    with pytest.raises(StaleError, match=r"aten.add.Tensor was given was changed"):
        made.value()


def test_an_operand_that_a_deferred_value_is_written_to(calls: Calls, value: Tensor) -> None:
    other = value.clone()
    deferred = calls.call(value)
    made = deferred + other
    other.copy_(deferred * 2)
    assert torch.equal(resolve(made), value * 2) and torch.equal(other, value * 2)


@torch.inference_mode()
def test_inference_mode(calls: Calls, value: Tensor) -> None:
    """Its tensors have no versions."""
    other = value.clone()
    deferred = calls.call(value)
    made, called = deferred + other, Captured({"x": other, "y": deferred})
    view = deferred[:, 2:]
    other.zero_()
    assert torch.equal(resolve(made), value + value) and torch.equal(called.get()["x"], value)
    view += 1
    value = value.clone()
    value[:, 2:] += 1
    assert torch.equal(resolve(deferred), value)


def test_captured_arguments(calls: Calls, value: Tensor) -> None:
    deferred, known = calls.call(value), calls.call(value)
    known.value()
    captured = Captured({"x": value, "d": {"y": value[0]}, "n": 3, "h": deferred, "k": known})
    assert captured.get()["x"] is value and captured.get()["n"] == 3
    deferred *= 2
    assert torch.equal(resolve(captured.get()["h"]), value) and torch.equal(resolve(deferred), value * 2)
    known.value().add_(1)
    with pytest.raises(StaleError, match="argument k"):
        captured.get()
    captured = Captured({"d": {"y": value[0]}})
    value.add_(1)
    with pytest.raises(StaleError, match="argument d"):
        captured.get()


def test_lazy_off_lets_views_wait_and_nothing_else(value: Tensor) -> None:
    calls = Calls(lazy=False)
    deferred = calls.call(value)
    views = [deferred[:, :2], deferred[0], deferred.unbind(1)[2], deferred.permute(2, 0, 1), deferred.chunk(2, 1)[1]]
    scalar = deferred[0, 0, 1]
    assert all(isinstance(view, Deferred) and view.pending for view in [*views, scalar]) and calls.runs == 0
    out = value + 3.0 * (deferred - value)
    assert type(out) is Tensor and torch.equal(out, value) and calls.runs == 1
    wants = [value[:, :2], value[0], value[:, 2], value.permute(2, 0, 1), value[:, 3:]]
    assert all(torch.equal(resolve(view), want) for view, want in zip(views, wants, strict=True))
    assert scalar.item() == 1 and not calls.flow.forced and calls.runs == 1


def test_einsum_keeps_its_rows(calls: Calls, value: Tensor) -> None:
    deferred, plain = calls.call(value), torch.tensor([0.5, -2.0])
    made = torch.einsum("c,brc->br", plain, deferred)
    assert isinstance(made, Deferred) and made.row == 1
    assert torch.equal(resolve(made), torch.einsum("c,brc->br", plain, value)) and not calls.flow.forced
    one = calls.call(value[:, :1])
    for equation, *operands in (
        ("brc,src->brs", value, one),  # one row against six
        ("brc,brd->bcd", deferred, deferred),  # a sum over rows
    ):
        got = torch.einsum(equation, *operands)
        assert torch.equal(resolve(got), torch.einsum(equation, *resolve(operands)))
    again = calls.call(value)
    assert torch.equal(torch.einsum(again, [0, 1, 2], plain, [2], [0, 1]), torch.einsum("brc,c->br", value, plain))


def test_shapes_alone_need_no_values(calls: Calls, value: Tensor) -> None:
    deferred = calls.call(value)
    assert torch.equal(torch.zeros_like(deferred), torch.zeros_like(value))
    assert torch.randn_like(deferred).shape == deferred.new_empty(2, 6, 2).shape == value.shape
    assert torch.equal(torch.full_like(deferred, 3, dtype=torch.int64), torch.full_like(value, 3, dtype=torch.int64))
    assert len(deferred) == 2 and deferred.is_contiguous() and calls.runs == 0


@pytest.mark.parametrize(
    "write",
    [
        lambda x, view: x.add_(1),
        lambda x, view: view.add_(1),
        lambda x, view: x.__setitem__(0, 1.0),
        lambda x, view: torch.mul(x, 2, out=x),
    ],
)
def test_writes_to_a_known_value_come_after_what_was_noted_with_it(calls: Calls, value: Tensor, write: Any) -> None:
    deferred = calls.call(value)
    view = deferred[:, ::2]  # crosses rows
    made = calls.call(value * 10) + deferred
    write(deferred, view)
    assert torch.equal(resolve(made), value * 11) and not torch.equal(resolve(deferred), value)


@pytest.mark.parametrize("inside", [False, True], ids=["", "inside a dispatch"])
def test_plain_views_count_the_versions_of_a_known_value(calls: Calls, value: Tensor, inside: bool) -> None:
    deferred = calls.call(value)
    view = deferred[:, ::2]
    if inside:  # as a run does that an operation has set off
        calls.flow.run = lambda: (resolve(view), calls.run())
        calls.call(value).sum()
    later = calls.call(value * 10)
    made = later + deferred
    if not inside:
        view = deferred
    view[0].add_(1)  # on a plain tensor
    with pytest.raises(StaleError):
        made.value()


def test_a_write_to_an_operand_when_all_calls_have_run(calls: Calls, value: Tensor) -> None:
    deferred, other = calls.call(value), value.clone()
    calls.run()
    made = deferred + other
    other.copy_(deferred * 3)
    assert torch.equal(resolve(made), value * 2)


def test_the_value_has_the_promised_strides(calls: Calls, value: Tensor) -> None:
    deferred = calls.call(value)
    deferred.fill(0, 6, value.transpose(0, 1).contiguous().transpose(0, 1))
    calls.flow.ran()
    assert deferred.band(0, 6).stride() != value.stride()
    assert resolve(deferred).stride() == value.stride() and torch.equal(deferred.view(-1), value.view(-1))


def test_bands_of_one_row_keep_their_row(calls: Calls, value: Tensor) -> None:
    value = value[:1, :, :1].clone()
    deferred = calls.call(value)
    made = [deferred.squeeze(), deferred.squeeze((1, 2)), deferred.squeeze(1), deferred.unbind(0)[0]]
    deferred.fill(0, 6, value)
    assert [list(m.band(2, 3).shape) for m in made] == [[1], [1, 1], [1, 1, 1], [1, 1]]
    assert [m.row for m in made] == [0, 1, 1, 0]


def test_bands_have_the_promoted_dtype(calls: Calls, value: Tensor) -> None:
    deferred = calls.call(value)
    made = torch.cat([deferred, value.double()], dim=1)
    deferred.fill(0, 6, value)
    assert made.dtype == made.band(0, 2).dtype == torch.float64


def test_rows_that_do_not_match_are_not_cut(calls: Calls, value: Tensor) -> None:
    one, six = calls.call(value[:, :1]), calls.call(value)
    assert torch.equal(resolve(one + six), value[:, :1] + value)
    square = calls.call(value[:, :2])
    assert torch.equal(resolve(square - square.mT), value[:, :2] - value[:, :2].mT)
