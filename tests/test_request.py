"""Requests: limits named in errors, the pipeline's arguments, and the JSON form."""

import json

import pytest

from ditpar.errors import RequestError
from ditpar.request import Request


def test_call_names_the_pipelines_arguments_and_defaults_yield():
    request = Request(
        "cat",
        negative="dog",
        width=64,
        height=32,
        steps=3,
        guidance=2.5,
        true_cfg=3,
        seed=1,
        extra={"max_sequence_length": 16},
    )
    call = request.call(
        {"num_inference_steps": 24, "output_type": "np", "max_sequence_length": 8}, {"output_type": "pil", "eta": 0}
    )
    assert call == {
        "prompt": "cat",
        "negative_prompt": "dog",
        "width": 64,
        "height": 32,
        "num_inference_steps": 3,
        "guidance_scale": 2.5,
        "true_cfg_scale": 3,
        "max_sequence_length": 16,
        "output_type": "np",
        "eta": 0,
    }


def test_seeds_and_single_images():
    request = Request("cat", seed=42, count=4)
    assert request.seeds == [42, 43, 44, 45]
    assert request.single(2) == Request("cat", seed=44)
    assert request.call()["num_images_per_prompt"] == 4


def test_json_round_trip():
    request = Request("cat", width=64, seed=5, extra={"a": [1, 2]})
    assert Request.from_json(json.loads(json.dumps(request.to_json()))) == request


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"prompt": "  "}, "prompt"),
        ({"prompt": "x" * 20001}, "20000 characters"),
        ({"width": 100}, "width=100 must be a multiple of 8"),
        ({"height": 0}, "height=0"),
        ({"width": 16392}, "16384"),
        ({"steps": 0}, "steps=0"),
        ({"steps": 10001}, "10000"),
        ({"steps": True}, "steps=True"),
        ({"count": 0}, "count=0"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**63}, "seed="),
        ({"guidance": float("nan")}, "guidance=nan"),
        ({"true_cfg": -1}, "true_cfg=-1"),
        ({"extra": {"generator": 1}}, "seed"),
        ({"extra": {"num_inference_steps": 1}}, "steps"),
        ({"extra": {"x": object()}}, "JSON"),
    ],
)
def test_values_out_of_their_limits_are_refused_by_name(kwargs, words):
    with pytest.raises(RequestError, match=words):
        Request(**{"prompt": "cat", **kwargs})


def test_json_with_unknown_or_missing_fields_is_refused():
    with pytest.raises(RequestError, match="colour"):
        Request.from_json({"prompt": "cat", "colour": "red"})
    with pytest.raises(RequestError, match="prompt is missing"):
        Request.from_json({"seed": 1})
