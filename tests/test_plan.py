"""Plans: text form, refusals by name with what would work, and the rule behind `auto`."""

import pytest

from ditpar.errors import ModelError, PlanError
from ditpar.family import families, family_of
from ditpar.plan import AXES, NOT_BUILT, Plan, auto

FLUX = families()["flux"]
SD3 = families()["sd3"]
CONFIG = {"num_attention_heads": 4, "attention_head_dim": 16}
GUIDED = {"true_cfg_scale": 3.0, "negative_prompt": "", "prompt": "x"}
PLAIN = {"true_cfg_scale": 1.0, "negative_prompt": None, "prompt": "x"}


@pytest.mark.parametrize(
    "text", ["single", "cfg=2", "cfg=2,ulysses=2", "data=2,ring=3,ulysses=2", "ulysses=2,components=rank0"]
)
def test_text_form_round_trips(text):
    assert str(Plan.parse(text)) == text
    assert Plan.parse(str(Plan.parse(text))) == Plan.parse(text)


def test_order_and_spaces_do_not_matter():
    assert Plan.parse(" ulysses = 2 , cfg=2 ") == Plan(cfg=2, ulysses=2)
    assert Plan.parse("") == Plan() and Plan.parse(Plan(ring=2)) == Plan(ring=2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cfg", "cfg"),
        ("ulises=2", "ulises=2"),
        ("cfg=two", "cfg=two"),
        ("cfg=-1", "cfg=-1"),
        ("cfg=0", "cfg=0"),
        ("cfg=2,cfg=2", "twice"),
        ("cfg=2.0", "cfg=2.0"),
        ("components=some", "components"),
    ],
)
def test_bad_text_is_refused_by_name(text, words):
    with pytest.raises(PlanError, match=words):
        Plan.parse(text)


def test_world_is_the_product_of_degrees():
    assert Plan(data=2, cfg=2, ring=3).world == 12
    assert set(Plan().degrees) == set(AXES)


@pytest.mark.parametrize("axis", NOT_BUILT)
def test_methods_not_built_are_refused_with_what_works(axis):
    with pytest.raises(PlanError, match=rf"{axis}=2.*not built.*ulysses=2 works"):
        Plan(**{axis: 2}).validate(FLUX, CONFIG)


def test_ranks_must_agree_with_the_plan():
    with pytest.raises(PlanError, match=r"needs 2 ranks but there are 4; plan ulysses=4 works"):
        Plan(cfg=2).validate(FLUX, CONFIG, GUIDED, world=4)


def test_more_ulysses_ranks_than_heads_are_refused():
    with pytest.raises(PlanError, match="4 attention heads"):
        Plan(ulysses=5).validate(FLUX, CONFIG)
    Plan(ulysses=3).validate(FLUX, CONFIG)


def test_cfg_needs_guidance_in_the_request():
    Plan(cfg=2).validate(FLUX, CONFIG, GUIDED)
    with pytest.raises(PlanError, match="true_cfg_scale above 1 and a negative_prompt.*ulysses=2"):
        Plan(cfg=2).validate(FLUX, CONFIG, PLAIN)
    with pytest.raises(PlanError, match="negative_prompt"):
        Plan(cfg=2).validate(FLUX, CONFIG, {**GUIDED, "negative_prompt": None})
    with pytest.raises(PlanError, match="cfg=3"):
        Plan(cfg=3).validate(FLUX, CONFIG)
    Plan(cfg=2).validate(SD3, CONFIG, {"guidance_scale": 7.0, "prompt": "x"})


def test_data_needs_as_many_images():
    with pytest.raises(PlanError, match="data=2 needs at least 2 images"):
        Plan(data=2).validate(FLUX, CONFIG, PLAIN)
    Plan(data=2).validate(FLUX, CONFIG, {**PLAIN, "num_images_per_prompt": 2})
    Plan(data=2).validate(FLUX, CONFIG, {**PLAIN, "prompt": ["x", "y"]})


def test_memory_for_keys_and_values_is_checked():
    call = {**PLAIN, "height": 1024, "width": 1024}
    need = FLUX.exchange_bytes(CONFIG, call, 2, 1, 1, 1)
    assert need == 2 * 4 * 2 * (64 * 64 // 2) * 64  # k and v, fp32, two blocks, half the tokens, 4 heads x 16
    Plan(ring=2).validate(FLUX, CONFIG, call, 2, memory=need)
    with pytest.raises(PlanError, match="keys and values"):
        Plan(ring=2).validate(FLUX, CONFIG, call, 2, memory=need - 1)


@pytest.mark.parametrize(
    ("family", "call", "ranks", "plan"),
    [
        (FLUX, GUIDED, 1, "single"),
        (FLUX, GUIDED, 2, "cfg=2"),
        (FLUX, PLAIN, 2, "ulysses=2"),
        (FLUX, GUIDED, 4, "cfg=2,ulysses=2"),
        (FLUX, GUIDED, 16, "cfg=2,ring=2,ulysses=4"),
        (FLUX, None, 3, "ring=3"),
        (FLUX, GUIDED, 3, "ring=3"),
    ],
)
def test_auto(family, call, ranks, plan):
    chosen = auto(family, CONFIG, call, ranks)
    assert str(chosen) == plan and chosen.world == ranks
    chosen.validate(family, CONFIG, call, ranks)


def test_unknown_transformer_points_to_the_guide():
    with pytest.raises(ModelError, match=r"MadeUpModel.*docs/adding-a-family.md"):
        family_of("MadeUpModel")


def test_records_are_short_and_found_by_class():
    for family in families().values():
        assert family_of(family.transformer) is family


def test_what_a_stage_keeps_is_weighed_against_memory() -> None:
    """Flux at 1024 x 1024: keys and values of 19 + 38 blocks over 4096 tokens, in fp32, for both branches."""
    family = families()["flux"]
    config = {"num_attention_heads": 24, "attention_head_dim": 128, "num_layers": 19, "num_single_layers": 38}
    call = {"height": 1024, "width": 1024, "prompt": "x", "true_cfg_scale": 3.0, "negative_prompt": ""}
    site = 2 * 4096 * 3072 * 4
    for plan, need in (("pipe=2", site * 29 * 2), ("pipe=4,ulysses=2", site * 15), ("cfg=2,pipe=2", site * 29)):
        Plan.parse(plan).validate(family, config, call, memory=need)
        with pytest.raises(PlanError, match=f"{plan} holds {need >> 20} MiB .* use more stages"):
            Plan.parse(plan).validate(family, config, call, memory=need - 1)
    with pytest.raises(PlanError, match="pipe=58 exceeds the model's 57 blocks"):
        Plan.parse("pipe=58").validate(family, config)
