import pytest

from esper.karn import notation


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (notation.points(61.84), "61.8"),
        (notation.points(0.0), "0.0"),
        (notation.points(1.23456, 3), "1.235"),
        (notation.gain(2.0), "+2.0"),
        (notation.gain(-0.04), "+0.0"),
        (notation.gain(-3.0), "-3.0"),
        (notation.count(4936), "4,936"),
        (notation.count(4935.6), "4,936"),
        (notation.factor(500, 200), "×2.50"),
        (notation.factor(5000, 200), "×25"),
        (notation.flop(0), "0 FLOP"),
        (notation.flop(999), "999 FLOP"),
        (notation.flop(1000), "1.00 kFLOP"),
        (notation.flop(12_345_678), "12.3 MFLOP"),
        (notation.flop(999_600_000), "1.00 GFLOP"),
        (notation.flop(250_000_000), "250 MFLOP"),
        (notation.share(0.0), "0 %"),
        (notation.share(0.001), "<1 %"),
        (notation.share(0.005), "0 %"),
        (notation.share(0.256), "26 %"),
        (notation.duration(0.5), "0.5 ms"),
        (notation.duration(999.4), "999 ms"),
        (notation.duration(1500.0), "1.5 s"),
        (notation.duration(3_600_000.0), "1:00:00"),
        (notation.significant(1234.5), "1.23e+03"),
        (notation.significant(0.05), "0.05"),
        (notation.clock(0), "0:00:00"),
        (notation.clock(3725.9), "1:02:05"),
        # The value None is formatted as a dash, never as 0.
        (notation.points(None), "–"),
        (notation.gain(notation.difference(1.0, None)), "–"),
        (notation.count(None), "–"),
        (notation.factor(None, 3), "–"),
        (notation.factor(3, None), "–"),
        (notation.factor(3, 0), "–"),
        (notation.flop(None), "–"),
        (notation.clock(None), "–"),
        (notation.share(None), "–"),
        (notation.duration(None), "–"),
        (notation.significant(None), "–"),
    ],
)
def test_numbers_are_formatted_with_their_unit_and_none_is_formatted_as_a_dash(shown, expected):
    assert shown == expected


def test_long_series_is_shortened_by_averaging_neighbouring_values():
    assert notation.condense([1.0, 3.0, None, 5.0, None, None], 3) == [2.0, 5.0, None]
    assert notation.condense([1.0, None], 3) == [1.0, None]


def test_sparkline_heights_are_scaled_to_the_given_range_or_else_to_the_range_of_the_values():
    # A sparkline has blocks of eight heights; unknown values are gaps, and a constant series has the lowest
    # block.
    assert notation.trend([0, 10, 20, None, 60, 70], 6) == "▁▂▃ ▇█"
    assert notation.trend([5.0, 5.0], 2) == "▁▁"
    assert notation.trend([0.0, 0.5, 1.0], 3, 0.0, 7.0) == "▁▁▂"
    assert notation.trend([-1.0, 2.0], 2, 0.0, 1.0) == "▁█"
    assert notation.trend([None, None], 3) == "  "
