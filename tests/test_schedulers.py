"""Every stock scheduler, through every family's pipeline, with deferred transformer calls: the same bits, no waiting.

The table is written to docs/deferred.md when DITPAR_WRITE_DOCS is set.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from banded import banded
from torch import Tensor

from ditpar.conformance.variants import VARIANTS, Variant
from ditpar.dataflow.deferred import resolve
from ditpar.family import families

STEPS = 5
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
SDE = {"algorithm_type": "sde-dpmsolver++"}
SCHEDULERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "DDIM": ("DDIMScheduler", {}),
    "DDPM": ("DDPMScheduler", {}),
    "DPM++ 1M": ("DPMSolverMultistepScheduler", {"solver_order": 1}),
    "DPM++ 2M": ("DPMSolverMultistepScheduler", {}),
    "DPM++ 3M": ("DPMSolverMultistepScheduler", {"solver_order": 3}),
    "DPM++ 2M heun karras": ("DPMSolverMultistepScheduler", {"solver_type": "heun", "use_karras_sigmas": True}),
    "DPM++ 2M flow": ("DPMSolverMultistepScheduler", FLOW),
    "DPM++ 2M SDE": ("DPMSolverMultistepScheduler", SDE),
    "DPM++ 3M SDE": ("DPMSolverMultistepScheduler", {**SDE, "solver_order": 3}),
    "DPM 2M": ("DPMSolverMultistepScheduler", {"algorithm_type": "dpmsolver", "final_sigmas_type": "sigma_min"}),
    "DPM 2M SDE": (
        "DPMSolverMultistepScheduler",
        {"algorithm_type": "sde-dpmsolver", "final_sigmas_type": "sigma_min"},
    ),
    "DPM++ 2S": ("DPMSolverSinglestepScheduler", {}),
    "DPM++ 3S": ("DPMSolverSinglestepScheduler", {"solver_order": 3}),
    "DPM++ 2S SDE": ("DPMSolverSinglestepScheduler", SDE),
    "DPM++ SDE": ("DPMSolverSDEScheduler", {}),
    "UniPC": ("UniPCMultistepScheduler", {}),
    "UniPC 3 bh1": (
        "UniPCMultistepScheduler",
        {"solver_order": 3, "solver_type": "bh1", "final_sigmas_type": "sigma_min"},
    ),
    "UniPC flow": ("UniPCMultistepScheduler", {**FLOW, "flow_shift": 3.0}),
    "Euler": ("EulerDiscreteScheduler", {}),
    "Euler a": ("EulerAncestralDiscreteScheduler", {}),
    "Heun": ("HeunDiscreteScheduler", {}),
    "KDPM2": ("KDPM2DiscreteScheduler", {}),
    "KDPM2 a": ("KDPM2AncestralDiscreteScheduler", {}),
    "LMS": ("LMSDiscreteScheduler", {}),
    "DEIS": ("DEISMultistepScheduler", {}),
    "DEIS 3": ("DEISMultistepScheduler", {"solver_order": 3}),
    "PNDM": ("PNDMScheduler", {}),
    "PLMS": ("PNDMScheduler", {"skip_prk_steps": True}),
    "IPNDM": ("IPNDMScheduler", {}),
    "LCM": ("LCMScheduler", {}),
    "TCD": ("TCDScheduler", {}),
    "SA": ("SASolverScheduler", {}),
    "flow Euler": ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}),
    "flow Euler stochastic": ("FlowMatchEulerDiscreteScheduler", {"stochastic_sampling": True}),
    "flow Euler dynamic": ("FlowMatchEulerDiscreteScheduler", {"use_dynamic_shifting": True}),
    "flow Heun": ("FlowMatchHeunDiscreteScheduler", {}),
    "flow LCM": ("FlowMatchLCMScheduler", {}),
    "EDM Euler": ("EDMEulerScheduler", {}),
    "EDM DPM++ 2M": ("EDMDPMSolverMultistepScheduler", {}),
    "EDM DPM++ 3M": ("EDMDPMSolverMultistepScheduler", {"solver_order": 3}),
    "DDIM thresholding": ("DDIMScheduler", {"thresholding": True}),
    "DDPM thresholding": ("DDPMScheduler", {"thresholding": True}),
    "DPM++ 2M thresholding": ("DPMSolverMultistepScheduler", {"thresholding": True}),
    "DPM++ 2S thresholding": ("DPMSolverSinglestepScheduler", {"thresholding": True}),
    "UniPC thresholding": ("UniPCMultistepScheduler", {"thresholding": True}),
    "DEIS thresholding": ("DEISMultistepScheduler", {"thresholding": True}),
    "LCM thresholding": ("LCMScheduler", {"thresholding": True}),
    "SA thresholding": ("SASolverScheduler", {"thresholding": True}),
    "EDM DPM++ thresholding": ("EDMDPMSolverMultistepScheduler", {"thresholding": True}),
}
SIGMAS = (
    "does not support custom sigmas schedules|got an unexpected keyword argument 'mu'|sigmas. is only supported when"
)
NO_NOISE = "no attribute 'init_noise_sigma'"
NO_INDEX = "no attribute '(set_begin_index|sigmas)'"
NO_MU = "`mu` must be passed"
_GIVEN_SIGMAS = {name: SIGMAS for name in SCHEDULERS if not re.match("flow (Euler|LCM)|UniPC flow", name)}
REJECTED: Mapping[str, Mapping[str, str]] = {
    "flux": {**_GIVEN_SIGMAS, "DPM++ 2M flow": "^$"},
    "qwenimage": {**_GIVEN_SIGMAS},
    "sd3": {},
    "pixart": {**{name: NO_NOISE for name in SCHEDULERS if name.startswith("flow")}, "flow Euler dynamic": NO_MU},
    "wan": {
        **{name: NO_INDEX for name in SCHEDULERS if re.match("DDIM|DDPM|PNDM|PLMS|IPNDM|LCM|TCD", name)},
        "flow Euler dynamic": NO_MU,
    },
}
"""Where the stock pipeline itself raises, by family and scheduler: what its error says."""
MISSING = {"DPM++ SDE": "torchsde", "LMS": "scipy"}
"""Schedulers of which diffusers has only a stand-in without this package."""
CROSSING = {
    "thresholding": "_threshold_sample",  # a quantile of each whole sample
    # It adds to a tensor that it made like the plain first latents: a plain tensor cannot wait for rows.
    "SA": "stochastic_adams_(bashforth|moulton)_update",
}
"""The functions whose operations rightly run everything pending, by a part of the scheduler's name."""
CASES = [(family, scheduler) for family in families() for scheduler in SCHEDULERS]
FORCED: dict[tuple[str, str], Counter[tuple[str, str]] | str] = {}


@cache
def built(family: str, variant: str) -> Any:
    return named(family, variant).build(families()[family])


def named(family: str, variant: str) -> Variant:
    return next(v for v in VARIANTS[family] if v.name == variant)


def generate(family: str, variant: str = "plain", scheduler: str | None = None, **call: Any) -> Tensor:
    """One run from a fixed seed, which the steps of some pipelines draw from the default generator."""
    pipe = built(family, variant)
    if scheduler is not None:
        name, options = SCHEDULERS[scheduler]
        pipe.scheduler = getattr(diffusers, name)(**options)
    torch.manual_seed(7)
    return pipe(**named(family, variant).inputs(families()[family], pipe, **{"steps": STEPS, **call}))[0]


@pytest.mark.parametrize(("family", "scheduler"), CASES, ids=lambda v: v.replace(" ", "_"))
def test_same_bits(family: str, scheduler: str) -> None:
    missing = MISSING.get(scheduler)
    if missing is not None and isinstance(getattr(diffusers, SCHEDULERS[scheduler][0]), diffusers.utils.DummyObject):
        FORCED[family, scheduler] = f"needs {missing}"
        pytest.skip(f"needs {missing}")
    rejected = REJECTED[family].get(scheduler)
    if rejected is not None:
        with pytest.raises((AssertionError, AttributeError, TypeError, ValueError), match=rejected):
            generate(family, scheduler=scheduler)
        FORCED[family, scheduler] = "stock raises"
        return
    want = generate(family, scheduler=scheduler)
    assert want.isfinite().all()
    with banded(built(family, "plain"), families()[family]) as played:
        got = resolve(generate(family, scheduler=scheduler))
    assert torch.equal(got, want)
    FORCED[family, scheduler] = played.flow.forced
    crossing = next((line for name, line in CROSSING.items() if name in scheduler), None)
    forced = [place for _, place in played.flow.forced]
    assert all(crossing and re.search(crossing, place) for place in forced), played.flow.forced
    calls_a_step = 1 if families()[family].cfg.style == "batched" else 2
    if crossing is None:
        assert played.steps == played.flow.calls // calls_a_step - 1 >= STEPS - 1
    else:
        assert forced and played.steps == 0


def render(forced: Mapping[tuple[str, str], Counter[tuple[str, str]] | str]) -> str:
    """The table of docs/deferred.md."""
    lines = ["| scheduler | " + " | ".join(families()) + " |", "| --- |" + " --- |" * len(families())]
    for scheduler in SCHEDULERS:
        found = [forced[family, scheduler] for family in families()]
        cells = [cell if isinstance(cell, str) else str(sum(cell.values())) for cell in found]
        lines.append(f"| {scheduler} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def test_table() -> None:
    """The table in docs/deferred.md is what this run counted."""
    if set(FORCED) != set(CASES):
        pytest.skip("the table needs all cases of one run")
    path = Path(__file__).parent.parent / "docs" / "deferred.md"
    text = path.read_text()
    start = text.index("| scheduler |")
    if os.environ.get("DITPAR_WRITE_DOCS"):
        path.write_text(text[:start] + render(FORCED))
    rows = [line for line in render(FORCED).splitlines() if "needs" not in line]  # what is installed may differ
    assert set(rows) <= set(path.read_text().splitlines())


OTHERS = [(family, variant.name) for family in families() for variant in VARIANTS[family] if variant.name != "plain"]


@pytest.mark.parametrize(("family", "variant"), OTHERS, ids=lambda v: v.replace(" ", "_"))
def test_other_pipelines(family: str, variant: str) -> None:
    """Reference tokens, start images, masks, two transformers, several images: no operation crosses rows."""
    call: dict[str, Any] = {next(iter(named(family, variant).several)): 2, "steps": 4}
    want = generate(family, variant, **call)
    with banded(built(family, variant), families()[family]) as played:
        got = resolve(generate(family, variant, **call))
    assert torch.equal(got, want)
    assert not played.flow.forced and played.steps >= 2


@pytest.mark.parametrize("family", ["wan"])
def test_few_rows(family: str) -> None:
    """A video's latent frames as rows: fewer of them than bands."""
    want = generate(family, scheduler="UniPC flow", steps=3)
    with banded(built(family, "plain"), families()[family], row=2) as played:
        got = resolve(generate(family, scheduler="UniPC flow", steps=3))
    assert torch.equal(got, want) and not played.flow.forced
