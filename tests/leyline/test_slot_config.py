import re

import pytest

from esper.leyline import EsperError, SlotConfig, UnknownNameError
from esper.leyline.errors import SlotError


def test_any_count() -> None:
    assert SlotConfig.of_count(8).slot_ids[-1] == "r0c7"
    assert SlotConfig.of_count(1).slot_ids == ("r0c0",)


def test_index_follows_the_order_given() -> None:
    config = SlotConfig(("r1c0", "r0c12"))
    assert (config.index_of("r1c0"), config.index_of("r0c12")) == (0, 1)


def test_select_flags_the_wanted_in_slot_order() -> None:
    assert SlotConfig.default().select(["r0c2", "r0c0", "r0c2"]) == (True, False, True)


@pytest.mark.parametrize(
    ("ids", "sentence"),
    [
        ((), "a model needs at least one slot; none was named"),
        (("r0c0", "conv1", "r0"), "slot ids must look like r0c2 (row, column); found conv1, r0"),
        (("r0c0", "r0c0"), "slot ids must be distinct; found r0c0, r0c0"),
    ],
)
def test_malformed_configurations(ids: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(SlotError, match=f"^{re.escape(sentence)}$"):
        SlotConfig(ids)


@pytest.mark.parametrize("lookup", [lambda c: c.index_of("r0c9"), lambda c: c.select(["r0c0", "r0c9"])])
def test_an_unknown_slot_names_the_known_ones(lookup) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(
        SlotError, match=r"^slot 'r0c9' is not in this model; its slots are r0c0, r0c1, r0c2$"
    ):
        lookup(SlotConfig.default())


def test_selecting_nothing_is_an_error() -> None:
    with pytest.raises(SlotError, match=r"^no slot was enabled; this model's slots are r0c0, r0c1, r0c2$"):
        SlotConfig.default().select([])


def test_an_unknown_name_comes_with_its_nearest() -> None:
    error = UnknownNameError("blueprint", "conv_hevy", ["conv_heavy", "norm"], hint="See the docs.")
    assert str(error) == (
        "unknown blueprint 'conv_hevy'; did you mean conv_heavy? Allowed: conv_heavy, norm. See the docs."
    )
    assert isinstance(error, EsperError)


def test_a_name_far_from_all_gets_no_suggestion() -> None:
    assert str(UnknownNameError("task", "xyz", ["digits"])) == "unknown task 'xyz'. Allowed: digits."
    assert str(UnknownNameError("task", "xyz", [])) == "unknown task 'xyz'. Allowed: none."
