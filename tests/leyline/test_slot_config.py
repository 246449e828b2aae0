import re

import pytest

from esper.leyline import EsperError, SlotConfig, UnknownNameError
from esper.leyline.errors import SlotError


def test_slot_config_keeps_slot_ids_in_the_given_order() -> None:
    assert SlotConfig.of_count(8).slot_ids[-1] == "r0c7"
    config = SlotConfig(("r1c0", "r0c12"))
    assert (config.index_of("r1c0"), config.index_of("r0c12")) == (0, 1)
    assert SlotConfig.default().select(["r0c2", "r0c0", "r0c2"]) == (True, False, True)


@pytest.mark.parametrize(
    ("ids", "sentence"),
    [
        ((), "a model needs at least one slot; none was named"),
        (
            ("r0c0", "layer 1", "a@b", "layer2.0"),
            "slot ids are names such as r0c2 or layer2.0, without blanks and @:,; found ['layer 1', 'a@b']",
        ),
        (("r0c0", "r0c0"), "slot ids must be distinct; found r0c0, r0c0"),
    ],
)
def test_invalid_slot_ids_raise_slot_error(ids: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(SlotError, match=f"^{re.escape(sentence)}$"):
        SlotConfig(ids)


@pytest.mark.parametrize("lookup", [lambda c: c.index_of("r0c9"), lambda c: c.select(["r0c0", "r0c9"])])
def test_unknown_slot_error_lists_the_slots_of_the_model(lookup) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(
        SlotError, match=r"^slot 'r0c9' is not in this model; its slots are r0c0, r0c1, r0c2$"
    ):
        lookup(SlotConfig.default())


def test_selecting_an_empty_list_of_slots_raises_slot_error() -> None:
    with pytest.raises(SlotError, match=r"^no slot was enabled; this model's slots are r0c0, r0c1, r0c2$"):
        SlotConfig.default().select([])


@pytest.mark.parametrize(
    ("kind", "found", "allowed", "hint", "sentence"),
    [
        ("task", "xyz", ["digits"], "", "unknown task 'xyz'. Allowed: digits."),
        ("task", "xyz", [], "", "unknown task 'xyz'. Allowed: none."),
        (
            *("seed", "conv_hevy", ["conv_heavy", "norm"], "See the docs."),
            "unknown seed 'conv_hevy'; did you mean conv_heavy? Allowed: conv_heavy, norm. See the docs.",
        ),
    ],
)
def test_unknown_name_error_suggests_names_that_are_similar(
    kind: str, found: str, allowed: list[str], hint: str, sentence: str
) -> None:
    error = UnknownNameError(kind, found, allowed, hint)
    assert str(error) == sentence
    assert isinstance(error, EsperError)
