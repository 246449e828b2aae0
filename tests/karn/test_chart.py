from esper.karn.sections.chart import Bar, Scale, chart


def plain(bars: list[Bar], scale: Scale) -> list[str]:
    return [line.plain for line in chart(bars, scale)]


def test_a_bar_fills_its_share_of_the_lines():
    # Two lines are sixteen eighths: 0 shows one of them, 50 eight, 75 twelve, 100 all.
    bars = [Bar(0.0), Bar(50.0), Bar(75.0), Bar(100.0)]

    assert plain(bars, Scale(0.0, 100.0, 2)) == ["  ▄█", "▁███"]


def test_the_span_above_a_bar_is_shaded_and_the_ghost_lies_over_both():
    bars = [Bar(25.0, 100.0), Bar(25.0, 100.0, 80.0), Bar(100.0, 100.0, 20.0)]
    drawn = chart(bars, Scale(0.0, 100.0, 2))

    assert [line.plain for line in drawn] == ["░─█", "▄▄─"]
    assert "reverse" in {str(span.style) for span in drawn[1].spans}


def test_what_is_unknown_leaves_a_gap():
    assert plain([Bar(None), Bar(10.0)], Scale(0.0, 10.0, 1)) == [" █"]


def test_a_flat_course_lies_on_the_ground():
    assert plain([Bar(5.0), Bar(5.0)], Scale(5.0, 5.0, 2)) == ["  ", "▁▁"]
