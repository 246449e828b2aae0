from rich.text import Text

from esper.karn.sections.layout import Section, beside, flow, stack


def lines(name: str, count: int) -> list[Text]:
    return [Text(f"{name}{number}") for number in range(count)]


def plain(drawn: list[Text]) -> list[str]:
    return [line.plain for line in drawn]


def test_what_is_least_comes_before_what_is_wished_for():
    sections = [Section.of(lines("a", 4), least=1), Section.of(lines("b", 4), least=2)]

    assert plain(stack(sections, 2)) == ["a0", "b0"]
    assert plain(stack(sections, 3)) == ["a0", "b0", "b1"]
    assert plain(stack(sections, 6)) == ["a0", "a1", "a2", "a3", "b0", "b1"]


def test_blank_lines_come_before_extras():
    sections = [Section.of(lines("a", 1)), Section.extra(lines("b", 2)), Section.of(lines("c", 1))]

    assert plain(stack(sections, 2)) == ["a0", "c0"]
    assert plain(stack(sections, 4)) == ["a0", "", "c0"]
    assert plain(stack(sections, 5)) == ["a0", "", "b0", "", "c0"]


def test_sections_that_belong_together_are_set_apart_last():
    joined = Section.either(lines("b", 1), [], joined=True)
    sections = [Section.of(lines("a", 1)), joined, Section.of(lines("c", 1))]

    assert plain(stack(sections, 3)) == ["a0", "b0", "c0"]
    assert plain(stack(sections, 4)) == ["a0", "b0", "", "c0"]
    assert plain(stack(sections, 5)) == ["a0", "", "b0", "", "c0"]


def test_the_long_form_is_used_only_whole():
    section = Section.either(lines("short", 1), lines("long", 3), least=1)

    assert plain(stack([section], 2)) == ["short0"]
    assert plain(stack([section], 3)) == ["long0", "long1", "long2"]


def test_a_section_that_is_not_worth_so_few_lines_is_left_out():
    section = Section(lambda room: lines("a", room), most=5, start=3)

    assert plain(stack([section], 2)) == []
    assert plain(stack([section], 4)) == ["a0", "a1", "a2", "a3"]


def test_cells_stand_below_each_other_and_a_long_one_takes_two_places():
    cells = [Text(word) for word in ("one", "two", "a longer one", "four")]

    assert plain(flow("words", cells, 30, cell=8)) == [
        " words   one     two",
        "         a longer one    four",
    ]


def test_the_right_column_begins_where_the_left_one_ends():
    drawn = beside([Text("left"), Text("much too long")], [Text("right")], 6)

    assert plain(drawn) == ["left    right", "much …  "]
