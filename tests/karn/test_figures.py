import itertools
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest
from msgspec.structs import replace

from esper.karn.drawing.picture import Picture
from esper.karn.drawing.svg import LETTER, WIDTH
from esper.karn.figures import FIGURES, figure_named
from esper.karn.questions.episode_selection import EpisodeKey
from esper.karn.questions.slot_lanes import lanes
from esper.karn.run import Run, open_run
from esper.karn.run_result import verdict_picture
from esper.leyline import Stage
from esper.leyline.rows import EpochRow, Row, RunRow, SeedRow, UpdateRow
from tests.karn import fake_run, made_run
from tests.karn.made_run import alert_row
from tests.rows import change

SVG = "{http://www.w3.org/2000/svg}"


def rows_of_alerts() -> list[Row]:
    return [
        alert_row("entropy", scope="op", iteration=1),
        alert_row("entropy", "cleared", scope="op", iteration=2),
        alert_row("a_rule_with_quite_a_long_name", iteration=2),
        alert_row("collapse", env=0, episode=0, epoch=3),
    ]


def episode_in_progress() -> list[Row]:
    return [made_run.run_row(), *made_run.Episode(0, 0, 3, 20, random.Random(5)).live(epochs=9)]


def unknowns() -> list[Row]:
    """Return the telemetry rows of a policy training in which measured columns are null."""
    rows = made_run.training_rows(iterations=2, envs=2, horizon=4, full=False)
    for row in rows:
        if isinstance(row, EpochRow):
            change(row, twin_score=None)
        if isinstance(row, UpdateRow):
            unknown = (
                *("mean_return", "val_score", "entropy", "approx_kl", "value_loss"),
                *("explained_variance", "value_nrmse", "ratio_max", "ratio_min"),
            )
            change(row, **dict.fromkeys(unknown), head_entropy=[], reward_terms={"lead": None})
    return rows


ROWS = {
    "nothing": lambda: [made_run.run_row()],
    "one epoch": lambda: made_run.run_rows(horizon=1, slots=1),
    "no seeds": lambda: [row for row in made_run.run_rows(horizon=4) if isinstance(row, EpochRow | RunRow)],
    "an episode": made_run.run_rows,
    "an episode in progress": episode_in_progress,
    "eight slots": lambda: made_run.run_rows(slots=8, horizon=60, seed=1),
    "several episodes": lambda: made_run.run_rows(episodes=5),
    "one iteration": lambda: made_run.training_rows(iterations=1, envs=2, full=False),
    "a training": lambda: [*made_run.training_rows(iterations=4, envs=6), *rows_of_alerts()],
    "a long training": lambda: made_run.training_rows(iterations=210, envs=1, horizon=3, slots=2),
    "unknowns": unknowns,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("runs")
    return {
        name: open_run(made_run.write(folder / name.replace(" ", "_"), rows())) for name, rows in ROWS.items()
    }


def pictures(runs: dict[str, Run]) -> Iterator[tuple[str, Picture]]:
    """Yield a name and a drawn chart for every kind of chart and every test run."""
    for (name, run), figure in itertools.product(runs.items(), FIGURES):
        picture = figure.answer(run)
        if picture is not None:
            yield f"{figure.key} of {name}", picture
    yield "lanes of one episode", figure_named("lanes").answer(runs["a training"], EpisodeKey(1, 2))
    yield "verdict", verdict_picture(runs)


@pytest.fixture(scope="module")
def drawn(runs) -> dict[str, Picture]:
    return dict(pictures(runs))


class Box(NamedTuple):
    """Text of an SVG chart, with an upper estimate of its bounding box."""

    content: str
    left: float
    top: float
    right: float
    bottom: float


def box_of(text: ElementTree.Element) -> Box:
    content = "".join(text.itertext())
    x, y, width = float(text.get("x")), float(text.get("y")), LETTER * len(content)
    left = {"end": x - width, "middle": x - width / 2}.get(text.get("text-anchor"), x)
    return Box(content, left, y - 11, left + width, y + 2)


def boxes(picture: Picture) -> list[Box]:
    return [box_of(text) for text in ElementTree.fromstring(picture.svg).iter(f"{SVG}text")]


def overlap(one: Box, other: Box) -> bool:
    return (
        one.left < other.right
        and other.left < one.right
        and one.top < other.bottom
        and other.top < one.bottom
    )


# --- all pictures -----------------------------------------------------------------------------------


def test_every_kind_of_chart_is_drawn_for_at_least_one_test_run(drawn):
    assert {name.split(" of ")[0] for name in drawn} == {"verdict", *(figure.key for figure in FIGURES)}


def test_svg_chart_is_well_formed_xml_with_title_and_description(drawn):
    for name, picture in drawn.items():
        root = ElementTree.fromstring(picture.svg)
        assert root.tag == f"{SVG}svg", name
        assert [child.tag for child in root][:2] == [f"{SVG}title", f"{SVG}desc"], name
        assert all(child.text for child in list(root)[:2]), name
        assert picture.caption.endswith("."), name


def test_every_coordinate_in_an_svg_chart_is_a_finite_number(drawn):
    for name, picture in drawn.items():
        assert not re.search(r"\b(nan|inf|None)\b", picture.svg), name
        assert not re.search(r"\d\.\d\d", " ".join(re.findall(r' d="([^"]*)"', picture.svg))), name


def test_texts_of_an_svg_chart_stay_within_its_edges_and_do_not_overlap(drawn):
    for name, picture in drawn.items():
        height = float(ElementTree.fromstring(picture.svg).get("viewBox").split()[3])
        found = boxes(picture)
        for box in found:
            assert -2 <= box.left <= box.right <= WIDTH + 2, (name, box)
            assert -2 <= box.top <= box.bottom <= height + 1, (name, box)
        for one, other in itertools.combinations(found, 2):
            assert not overlap(one, other), (name, one, other)


def test_rectangles_of_an_svg_chart_stay_within_its_edges(drawn):
    for name, picture in drawn.items():
        root = ElementTree.fromstring(picture.svg)
        height = float(root.get("viewBox").split()[3])
        for shape in root.iter(f"{SVG}rect"):
            x, y, wide, high = (float(shape.get(key)) for key in ("x", "y", "width", "height"))
            assert wide >= 0, name
            assert high >= 0, name
            assert -1 <= x <= x + wide <= WIDTH + 1, (name, shape.attrib)
            assert -1 <= y <= y + high <= height + 1, (name, shape.attrib)


def test_svg_charts_of_a_training_with_210_iterations_have_less_than_400_kilobytes(runs):
    answers = {figure.key: figure.answer(runs["a long training"]) for figure in FIGURES}
    sizes = {key: len(picture.svg.encode()) for key, picture in answers.items() if picture is not None}

    assert sum(sizes.values()) < 400_000, sizes


def test_run_without_telemetry_rows_has_only_an_empty_chart_of_alerts(runs):
    answers = {figure.key: figure.answer(runs["nothing"]) for figure in FIGURES}

    assert {key for key, picture in answers.items() if picture is not None} == {"alerts"}
    assert answers["alerts"].rows == []


def test_chart_whose_table_has_a_row_of_wrong_length_raises_an_error():
    with pytest.raises(ValueError, match="2 cells"):
        Picture("", ["a", "b"], [["1"]], "")


def test_standalone_svg_chart_contains_its_stylesheet(drawn):
    text = drawn["lanes of an episode"].standalone()
    # Jupyter notebooks call ``_repr_svg_`` to display a chart.
    assert drawn["lanes of an episode"]._repr_svg_() == text
    style = ElementTree.fromstring(text).find(f"{SVG}style")

    assert "--stage-fossilized:#009E73" in style.text
    assert "prefers-color-scheme:dark" in style.text


# --- drawing and table agree ------------------------------------------------------------------------


def texts(picture: Picture) -> list[str]:
    return [box.content for box in boxes(picture)]


def test_line_labels_of_the_score_chart_show_the_values_in_the_last_row_of_its_table(drawn):
    for name in ("growth of an episode", "growth of a training"):
        last = dict(zip(drawn[name].columns, drawn[name].rows[-1], strict=True))
        assert {f"score {last['score']}", f"twin {last['twin']}", f"{last['parameters']} params"} <= set(
            texts(drawn[name])
        )


def test_labels_of_fossils_in_the_slot_timeline_equal_the_table_of_the_chart(drawn):
    picture = drawn["lanes of an episode"]
    shown = texts(picture)
    kept = [row for row in picture.rows if row[4].startswith("fossilized")]

    assert kept
    for row in kept:
        assert row[5] in shown
        assert f"{row[6]} params" in shown


def test_labels_of_the_chart_of_blueprint_contributions_equal_the_table_of_the_chart(drawn):
    picture = drawn["worth of a training"]
    shown = texts(picture)

    for row in picture.rows:
        assert row[0] in shown
        assert row[9] in shown
        assert f"{row[4]} kept, {row[5]} pruned" in shown


def test_chart_of_ppo_metrics_shows_the_exceeded_limit_of_a_metric_outside_its_normal_range(tmp_path):
    rows = made_run.training_rows(iterations=1, envs=1, horizon=2)
    for row in rows:
        if isinstance(row, UpdateRow):
            change(row, approx_kl=0.5, explained_variance=0.1, clip_fraction=0.2)
    picture = figure_named("health").answer(open_run(made_run.write(tmp_path / "run", rows)))
    looks = {
        "".join(text.itertext()): text.get("class")
        for text in ElementTree.fromstring(picture.svg).iter(f"{SVG}text")
    }

    assert looks["0.5 > 0.06"] == "strong"
    assert looks["0.1 < 0.3"] == "strong"
    assert looks["0.2"] == "dim"


# --- lanes ------------------------------------------------------------------------------------------


def bars(picture: Picture) -> list[tuple[float, float, str]]:
    """Return the left edge, right edge and stage of every bar in a timeline chart of slots."""
    rects = ElementTree.fromstring(picture.svg).iter(f"{SVG}rect")
    found = [rect for rect in rects if rect.find(f"{SVG}title") is not None]
    return [
        (float(rect.get("x")), float(rect.get("x")) + float(rect.get("width")), rect.get("class"))
        for rect in found
    ]


def hand_made(tmp_path: Path, *, full: bool) -> Picture:
    """Return the slot timeline of a seed that trains from epoch 0, blends from 2 and is a fossil from 4."""

    def seed(epoch: int, stage: Stage, alpha: float) -> SeedRow:
        return replace(fake_run.seed_row(0, 4), epoch=epoch, stage=stage, alpha=alpha)

    stages = [fake_run.D, fake_run.G, fake_run.T, fake_run.B, fake_run.H, fake_run.F]
    moves = [
        fake_run.transition_row(epoch, 0, *move, "policy", "")
        for epoch, move in zip((0, 0, 2, 4, 4), itertools.pairwise(stages), strict=True)
    ]
    seeds = [seed(epoch, Stage.BLENDING, 0.5) for epoch in (2, 3)]
    seeds += [seed(epoch, Stage.FOSSILIZED, 1.0) for epoch in range(4, 11)]
    epochs = [row for row in made_run.run_rows(horizon=10, slots=1) if isinstance(row, EpochRow)]
    rows: Sequence[Row] = [
        made_run.run_row(horizon=10, slots=["r0c0"]), *moves, *(seeds if full else []), *epochs
    ]  # fmt: skip
    picture = figure_named("lanes").answer(open_run(made_run.write(tmp_path / "run", rows)))
    assert picture is not None
    return picture


def test_bars_of_a_slot_timeline_cover_exactly_the_epochs_of_each_stage(tmp_path):
    picture = hand_made(tmp_path, full=True)
    # The x axis maps epochs 0 to 10 to SVG coordinates 48.4 to 516, so an epoch is 46.76 units wide.
    expected = [
        (48.4, 141.9, "tint training"),
        (141.9, 235.4, "tint blending"),
        (235.4, 516.0, "tint fossilized"),
    ]
    assert [look for _, _, look in bars(picture)] == [look for _, _, look in expected]
    for (left, right, _), (start, end, _) in zip(bars(picture), expected, strict=True):
        assert (left, right) == pytest.approx((start, end), abs=0.11)


def filled(picture: Picture, stage: str) -> list[float]:
    """Return the y coordinates of the edges of the filled part of a stage's bar in a slot timeline."""
    paths = [
        path.get("d")
        for path in ElementTree.fromstring(picture.svg).iter(f"{SVG}path")
        if path.get("class") == stage
    ]
    (commands,) = paths
    return [float(height) for height in re.findall(r"V(-?[\d.]+)", commands)]


def test_bar_of_a_slot_timeline_is_filled_in_proportion_to_alpha(tmp_path):
    picture = hand_made(tmp_path, full=True)

    # A bar of the chart is 25 units high with its base at y = 223, so at alpha 0.5 it is filled up to y =
    # 210.5.
    assert filled(picture, "training") == [223.0, 223.0]
    assert filled(picture, "blending") == [210.5, 223.0]
    assert filled(picture, "fossilized") == [198.0, 223.0]


def test_bars_of_a_slot_timeline_are_fully_filled_if_alpha_was_not_recorded(tmp_path):
    picture = hand_made(tmp_path, full=False)

    assert filled(picture, "training") == filled(picture, "blending") == [198.0, 223.0]
    assert "not recorded" in picture.caption


def test_slot_timeline_marks_germination_fossilization_and_pruning(drawn, runs):
    for name in ("an episode", "eight slots", "a training"):
        found = lanes(runs[name])
        marks = [mark for lane in found.lanes for mark in lane.marks]
        root = ElementTree.fromstring(drawn[f"lanes of {name}"].svg)
        titles = ["".join(title.itertext()) for title in root.iter(f"{SVG}title")]
        assert marks
        for mark in marks:
            stage = Stage(mark.to_stage).name.lower()
            assert any(f"{stage} after epoch {mark.epoch} (" in title for title in titles)
        assert sum(" after epoch " in title for title in titles) == len(marks)
