"""Deferred tensors: views wait, everything else computes once and equals plain tensors."""

import copy
import pickle

import pytest
import torch

from ditpar.dataflow.deferred import Captured, Deferred, resolve
from ditpar.errors import StaleError


def deferred(value):
    calls = []

    def compute():
        calls.append(1)
        return value

    return Deferred(compute, value.shape, value.dtype, value.device), calls


@pytest.fixture
def value():
    return torch.arange(24.0).view(2, 3, 4)


def test_views_stay_deferred_and_give_what_plain_views_give(value):
    lazy, calls = deferred(value)
    views = [
        lambda t: t[:, :2],
        lambda t: t[0],
        lambda t: t.unsqueeze(1),
        lambda t: t.permute(2, 0, 1),
        lambda t: t.transpose(1, 2),
    ]
    results = [view(lazy) for view in views]
    assert not calls
    for view, result in zip(views, results, strict=True):
        assert isinstance(result, Deferred) and result.shape == view(value).shape
        assert torch.equal(resolve(result), view(value))
    assert calls == [1]


def test_any_other_operation_computes_once_and_is_plain(value):
    lazy, calls = deferred(value)
    out = value + 3.0 * (lazy - value)
    assert type(out) is torch.Tensor and torch.equal(out, value)
    assert torch.equal(torch.norm(lazy, dim=-1), torch.norm(value, dim=-1))
    assert torch.equal(torch.einsum("abc->ca", lazy), torch.einsum("abc->ca", value))
    assert [t.shape for t in lazy.chunk(2)] == [t.shape for t in value.chunk(2)]
    assert calls == [1]


def test_writing_in_place_changes_the_deferred_itself(value):
    lazy, _ = deferred(value.clone())
    view = lazy[0]
    lazy.mul_(2)
    assert torch.equal(resolve(lazy), value * 2) and torch.equal(resolve(view), value[0] * 2)


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.numpy().tolist(),
        lambda t: t.tolist(),
        lambda t: t.sum().item(),
        lambda t: pickle.loads(pickle.dumps(t)),
        lambda t: copy.deepcopy(t),
        lambda t: t.float().cpu().numpy().tolist(),
        lambda t: bool((t > 3).any()),
        lambda t: __import__("numpy").asarray(t).tolist(),
    ],
)
def test_reading_without_an_operation(value, read):
    lazy, _ = deferred(value)
    got, want = read(lazy), read(value)
    assert torch.equal(got, want) if isinstance(want, torch.Tensor) else got == want


def test_a_promise_that_is_not_kept_is_an_error(value):
    lazy = Deferred(lambda: value[0], value.shape, value.dtype, value.device)
    with pytest.raises(AssertionError, match="promised"):
        lazy + 1


def test_captured_arguments_must_not_change(value):
    captured = Captured({"x": value, "d": {"y": value[0]}, "n": 3})
    assert captured.get()["x"] is value
    value.add_(1)
    with pytest.raises(StaleError, match="argument x"):
        captured.get()
