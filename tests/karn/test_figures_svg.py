import itertools
from xml.etree import ElementTree

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from esper.karn.drawing import svg
from esper.karn.drawing.axes import AxisScale, apart, around, tick_texts, ticks
from esper.karn.drawing.chart import stack
from esper.karn.palette import OPS
from esper.leyline import OP_NAMES

numbers = st.floats(-1e9, 1e9, allow_nan=False)
texts = st.lists(st.integers(0, 0x10FFFF).map(chr)).map("".join)
"""Hypothesis strategy for arbitrary texts, used because hypothesis takes seconds to build its default
alphabet.
"""


@settings(max_examples=30)
@given(texts, texts)
def test_any_text_is_unchanged_after_writing_and_parsing_svg(content, value):
    drawn = ElementTree.fromstring(svg.element("a", content or "x", title=value, left_out=None))
    forbidden = {*map(chr, range(32)), *map(chr, range(0xD800, 0xE000)), "\ufffe", "\uffff"} - {"\t", "\n"}
    kept = "".join(letter for letter in content if letter not in forbidden)

    assert (drawn.text or "") == (kept if content else "x")
    assert "left-out" not in drawn.attrib
    assert "title" in drawn.attrib


def test_svg_writer_escapes_text_but_not_markup():
    inner = svg.element("b", "<&>")

    assert svg.element("a", inner, "<", class_="x", stroke_width=2.25) == (
        '<a class="x" stroke-width="2.2"><b>&lt;&amp;&gt;</b>&lt;</a>'
    )


@pytest.mark.parametrize(
    ("value", "text"), [(1.0, "1"), (1.04, "1"), (-0.04, "0"), (12.35, "12.3"), (-2.5, "-2.5"), (100, "100")]
)
def test_svg_coordinates_have_at_most_one_decimal(value, text):
    assert svg.number(value) == text


def test_svg_curve_has_gaps_at_unknown_points_and_a_dot_for_an_isolated_point():
    drawn = svg.curve([(0, 1), (1, 2), None, (3, 4), None, (5, 5), (6, 6)], "line")

    assert drawn == '<path d="M0 1L1 2M5 5L6 6" class="line"/><path d="M3 4h0" class="dot small"/>'


def test_svg_step_curve_and_quantile_band_and_shortened_text_equal_values_derived_by_hand():
    # In a step curve, each horizontal segment has the height of its right end point.
    assert svg.steps(0, [(10, 5), (20, 7)]) == "M0 5V5H10V7H20"
    # A quantile band with a single point is widened to be visible.
    assert svg.fan([10], [1], [3]) == "M5 1L15 1L15 3L5 3z"
    assert (svg.shorten("abcdef", 6), svg.shorten("abcdefg", 6)) == ("abcdef", "abcde…")


# --- scales -----------------------------------------------------------------------------------------


def test_axis_scale_is_linear_and_maps_an_empty_range_to_the_middle():
    assert [AxisScale(0, 10, 100, 200)(value) for value in (0, 5, 10)] == [100, 150, 200]
    assert AxisScale(3, 3, 0, 10)(3) == 5


@given(low=numbers, span=st.floats(1e-6, 1e9), most=st.integers(1, 9), whole=st.booleans())
def test_axis_ticks_are_at_most_the_given_number_and_within_the_range_of_the_axis(low, span, most, whole):
    found = ticks(low, low + span, most, whole=whole)
    margin = 1e-6 * (abs(low) + span)

    assert len(found) <= max(most, 1)
    assert all(low - margin <= value <= low + span + margin for value in found)
    if whole:
        assert all(value == round(value) for value in found)


@pytest.mark.parametrize(
    ("low", "high", "most", "texts"),
    [
        (0, 100, 5, ["0", "50", "100"]),
        (0, 80, 5, ["0", "20", "40", "60", "80"]),
        (0, 0.5, 6, ["0.0", "0.1", "0.2", "0.3", "0.4", "0.5"]),
        (0, 4000, 4, ["0", "2k", "4k"]),
        (-1, 1, 5, ["-1.0", "-0.5", "0.0", "0.5", "1.0"]),
    ],
)
def test_labels_of_axis_ticks_have_as_many_decimals_as_the_distance_between_the_ticks_needs(
    low, high, most, texts
):
    assert list(tick_texts(ticks(low, high, most)).values()) == texts


@example([5e-324])
@given(st.lists(st.floats(0, 100), min_size=1, max_size=20))
def test_axis_range_contains_all_plotted_values(values):
    low, high = around(values, 4, floor=0.0)

    assert low < high
    assert low - 1e-9 <= min(values) <= max(values) <= high + 1e-9 * max(high, 1)


@given(st.lists(st.floats(0, 300), max_size=8))
def test_labels_of_curves_are_moved_to_a_minimum_distance_in_unchanged_order(heights):
    placed = apart(heights, 10)
    order = sorted(range(len(heights)), key=lambda index: heights[index])

    assert all(placed[b] - placed[a] > 10 - 1e-9 for a, b in itertools.pairwise(order))
    # Labels with enough distance between them do not move.
    assert apart([50, 10, 90]) == [50, 10, 90]


def test_stacked_bars_put_positive_values_above_and_negative_values_below_zero():
    assert stack([1.0, -2.0, None, 3.0, -1.0]) == [(0, 1), (0, -2), (1, 1), (1, 4), (-2, -3)]


# --- style ------------------------------------------------------------------------------------------


def test_every_lifecycle_op_has_a_colour_and_symbol():
    assert set(OPS) == set(OP_NAMES)
