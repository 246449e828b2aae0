"""Tables, charts and HTML page of a study with made-up numbers."""

import math
from collections.abc import Mapping
from xml.etree import ElementTree

import numpy as np

from esper.karn.study_page import ArmNumbers, StudyNumbers, render_study, study_pictures, study_tables
from tests.karn.page import read_page

FLOPS = {
    "charged": 4e9,
    "forward": 1e9,
    "backward": 2e9,
    "incubation": 0.0,
    "validation": 5e8,
    "counterfactual": 1e9,
}


def arm(
    name: str,
    *losses: list[float],
    static: bool = False,
    params: float = 1000.0,
    grown: tuple[bool, bool] = (False, False),
    is_plan: bool = False,
) -> ArmNumbers:
    """Return a study arm with ``losses`` by rng seed; its scores are 100 minus ten times the last losses."""
    values = np.array([losses])
    return ArmNumbers(
        name,
        static,
        values,
        100 - 10 * values[..., -1],
        np.array([params] * 2),
        FLOPS,
        np.array([2.0, 5.25]),
        np.array(grown),
        is_plan,
        "rate × 1",
    )


SMALL = arm("static:1", [2.0, 1.0], [4.0, 2.0], static=True)
LARGE = arm("static:2", [3.0, 0.8], [5.0, 1.8], static=True, params=2000.0)
GROWN = arm("grown", [2.2, 0.84], [4.0, 1.8], params=1500.0, grown=(False, True))
REFERENCE = {f"{own.name} × 1": own.losses[0] for own in (SMALL, LARGE)}


def study(*arms: ArmNumbers, reference: Mapping[str, np.ndarray] = REFERENCE) -> StudyNumbers:
    return StudyNumbers("made", 4 * 10**9, (0.5, 1.0), range(7, 9), arms, "static:1", reference)


def rows(found: StudyNumbers) -> list[dict[str, dict[str, str]]]:
    """Return the cells of every table of a study, by row name and column name."""
    return [
        {row[0]: dict(zip(table.columns, row, strict=True)) for row in (*table.rows, table.foot) if row}
        for table in study_tables(found)
    ]


def test_study_tables_contain_losses_regrets_equal_compute_score_differences_and_costs():
    losses, regrets, needed, ends, spent = rows(study(SMALL, LARGE, GROWN))
    assert losses["grown"]["2.00 GFLOP"] == "3.100"
    # Excess losses of the arm "grown" for two rng seeds: 10 % and 0 % at the first budget mark (regret 5 %),
    # 5 % and 0 % at the last (regret 2.5 %), the only one after growth. Bootstrap draws of the largest regret
    # range from 0 to 10 %.
    assert regrets["grown"] == {
        "arm": "grown", "2.00 GFLOP": "5.0 %", "4.00 GFLOP": "2.5 %",
        "largest (95 %)": "5.0 % (0.0 % to 10.0 %)",
        "largest after growth (95 %)": "2.5 % (0.0 % to 5.0 %)",
    }  # fmt: skip
    assert regrets["static:1"]["largest after growth (95 %)"] == "–"
    assert regrets["best static size × rate"]["4.00 GFLOP"] == "static:2 × 1"
    # The frontier has the mean losses 3 and 1.3; the mean losses of the arm "grown" are 3.1, which is above
    # the frontier, and 1.32. The frontier needs 2 ** -(log(1.32 / 1.3) / log(3 / 1.3)) = 0.987 times the
    # compute.
    assert needed["grown"] == {"arm": "grown", "2.00 GFLOP": "–", "4.00 GFLOP": "0.99"}
    # The scores 91.6 and 82 of the grown arm are 1.6 and 2 points above the scores 90 and 80 of static:1.
    assert ends["grown"]["above static:1 (95 %)"] == "+1.80 (+1.60 to +2.00)"
    assert ends["static:1"]["above static:1 (95 %)"] == ""
    # The p-value of the score difference from static:1 is 0.0704 for the grown arm (t = 9, one degree of
    # freedom), and 0 for the arm static:2, whose two differences are equal.
    assert [ends[name]["p (Holm)"] for name in ("static:2", "grown")] == ["0", "0.0704"]
    assert spent["grown"] == {
        "arm": "grown", "charged": "4.00 GFLOP", "of it incubation": "0 FLOP",
        "of it counterfactual": "1.00 GFLOP", "validation, not charged": "500 MFLOP", "CPU time": "5.2 s",
    }  # fmt: skip


def test_best_plan_in_hindsight_has_the_least_regret_of_all_plans_at_every_mark():
    # Against the losses 2, 4 and 0.8, 1.8 of the best sizes, the regrets of the plans are 50 % and 5 %, and
    # 10 % and 25 %. They are the same for both rng seeds.
    early = arm("early", [3.0, 0.84], [6.0, 1.89], grown=(True, True), is_plan=True)
    late = arm("late", [2.2, 1.0], [4.4, 2.25], grown=(False, True), is_plan=True)
    _, regrets, *_ = rows(study(SMALL, LARGE, early, late))
    assert [regrets[name]["2.00 GFLOP"] for name in ("early", "late")] == ["50.0 %", "10.0 %"]
    best = regrets["best plan in hindsight"]
    assert [best["2.00 GFLOP"], best["4.00 GFLOP"]] == ["10.0 %", "5.0 %"]
    assert best["largest (95 %)"] == "10.0 % (10.0 % to 10.0 %)"
    assert "best plan in hindsight" not in rows(study(SMALL, LARGE, early))[1]


def test_study_without_static_arms_has_no_table_or_chart_of_regret():
    found = study(GROWN, SMALL, reference={})
    assert [table.title for table in study_tables(found)] == [
        "made: test loss by compute", "made: test score after 4.00 GFLOP", "made: compute",
    ]  # fmt: skip
    assert len(study_pictures(found)) == 2


def test_losses_of_a_diverged_study_arm_are_dashes_in_tables_and_missing_in_charts():
    lost = arm("lost", [math.nan, math.nan], [4.0, 2.0], params=math.nan)
    losses, regrets, _, ends, _ = rows(study(SMALL, LARGE, lost))
    assert (
        losses["lost"]["4.00 GFLOP"] == regrets["lost"]["largest (95 %)"] == ends["lost"]["p (Holm)"] == "–"
    )
    assert "nan" not in render_study([study(SMALL, LARGE, lost)], "made")


def test_table_of_a_study_is_rendered_as_markdown():
    text = study_tables(study(SMALL, LARGE))[0].markdown()
    assert text.splitlines()[2:5] == [
        "| arm | 2.00 GFLOP | 4.00 GFLOP | chosen |",
        "| --- | --- | --- | --- |",
        "| static:1 | 3.000 | 1.500 | rate × 1 |",
    ]


def test_study_charts_have_thin_lines_for_static_arms_and_thick_lines_for_other_arms():
    pictures = dict(study_pictures(study(SMALL, LARGE, GROWN)))
    for heading in ("made: loss against compute", "made: regret against compute"):
        drawn = ElementTree.fromstring(pictures[heading].svg)
        looks = [path.get("class") for path in drawn.iter("{http://www.w3.org/2000/svg}path")]
        assert [look for look in looks if look not in ("grid", "axis")] == [
            "thin faint", "thin faint", "twin", "line",
        ]  # fmt: skip
        names = {text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")}
        assert {"static:1", "static:2", "grown", "2.00 GFLOP", "4.00 GFLOP"} <= names


def test_numeric_columns_of_study_tables_are_right_aligned_including_the_footer():
    page = read_page(render_study([study(SMALL, LARGE, GROWN)], "made"))
    rows = list(page.one("div", **{"aria-label": "made: regret by compute"}).all("tr"))
    for row in rows:
        assert [cell.attributes.get("class") for cell in row.all()] == ["text", None, None, None, None]
    assert [cell.text for cell in rows[-1].all()] == [
        "best static size × rate", "static:1 × 1", "static:2 × 1", "", "",
    ]  # fmt: skip


def test_html_page_of_a_study_is_self_contained_and_escapes_names_of_arms():
    page = render_study([study(SMALL, LARGE, arm("<b>", [1.0, 1.0], [1.0, 1.0]))], "made & done")
    assert "<b>" not in page
    assert "made &amp; done" in page
    assert "<link" not in page
