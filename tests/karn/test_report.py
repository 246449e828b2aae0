"""HTML reports of runs, parsed and compared with telemetry rows written by hand."""

from collections.abc import Iterable, Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from esper.karn.headline import Fact, comparison_text, conclude
from esper.karn.page.sections import command, render_report
from esper.karn.run import Run, open_run
from esper.karn.run_result import compare
from esper.leyline.rows import EpisodeRow, Row, UpdateRow
from esper.nissa.writer import RunWriter
from tests.karn import fake_run
from tests.karn.page import Node, read_page


def write(directory: Path, rows: Iterable[Row]) -> Run:
    """Write a run whose rows all have a time of 90 seconds after the start of the run."""
    with RunWriter(directory, clock=chain([0.0], repeat(90.0)).__next__) as writer:
        for row in rows:
            writer.emit(row)
    return open_run(directory)


def page_of(run: Run, *against: Run, reproduction: str | None = None) -> Node:
    return read_page(render_report(run, against, reproduction))


def headline(page: Node) -> str:
    return page.one(id="conclusion").one(class_="headline").text


def sentences(page: Node) -> list[str]:
    return [item.text for item in page.one("ul", class_="sentences").all("li")]


def facts(page: Node) -> dict[str, tuple[str, str]]:
    return {
        fact.one("dt").text: (fact.one(class_="value").text, fact.one(class_="note").text)
        for fact in page.one("dl", class_="facts").all("div")
    }


def pairs(section: Node) -> dict[str, str]:
    return {pair.one("dt").text: pair.one("dd").text for pair in section.all("div")}


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return write(tmp_path_factory.mktemp("runs") / "grown", [fake_run.run_row(), *fake_run.episode()])


@pytest.fixture(scope="module")
def grown_page(grown: Run) -> Node:
    return page_of(grown)


# --- one episode ------------------------------------------------------------------------------------


def test_report_starts_with_a_headline_that_has_the_scores_of_the_episode_row(grown_page: Node) -> None:
    """Expect score 61.5 (39.5 above the twin score 22) and 398 parameters (1.59 times the host's 250)."""
    expected = "It reached 61.5 on validation, 39.5 points above its twin that did not grow."
    assert headline(grown_page) == expected
    assert sentences(grown_page) == ["Finished after epoch 8 of 8."]
    assert facts(grown_page) == {
        "validation": ("61.5", "twin 22.0, +39.5"),
        "test": ("60.2", "read once, at the end"),
        "parameters": ("×1.59", "250 → 398"),
        "compute for a prediction": ("×12", "2.00 kFLOP → 25.0 kFLOP"),
        "compute of an episode": ("4.00 GFLOP", "training and measuring"),
        "time": ("0:01:30", "12.5 s an episode"),
    }


@pytest.mark.parametrize(
    ("episodes", "expected"),
    [
        ([{"val_score": 20.5}], "20.5 on validation, 1.5 points below its twin that did not grow."),
        ([{"twin_val_score": None}], "61.5 on validation; no twin is known to compare with."),
        # The scores 61.5 and 63.5 have mean 62.5 and standard error 1; the half-width of the interval is the
        # standard error times 12.7, the t quantile for one degree of freedom.
        (
            [{}, {"val_score": 63.5, "twin_val_score": 20.0}],
            "62.5 ± 12.7 on validation in the mean of 2 episodes, 41.5 ± 25.4 points above their twins that"
            " did not grow.",
        ),
    ],
)
def test_report_headline_compares_the_validation_score_with_the_twins_score(
    tmp_path: Path, episodes: list[dict[str, Any]], expected: str
) -> None:
    ends = [replace(fake_run.episode_row(n), **of) for n, of in enumerate(episodes)]
    run = write(tmp_path / "run", [fake_run.run_row(episodes=len(episodes)), *ends])
    assert conclude(run).headline == f"It reached {expected}"


def test_narrative_in_a_report_shows_a_symbol_for_the_final_stage_of_each_seed(grown_page: Node) -> None:
    notes = [item.text for item in grown_page.one("section", id="diary").all("li")]
    assert notes[0].startswith("epoch 0 ◆ conv_light germinated in r0c0; contribution +21.9 ± 0.8 points;")
    assert any(line.startswith("epoch 1 ✂ conv_heavy germinated in r0c1; ") for line in notes)
    assert "epoch 7 FOSSILIZE in r0c0 was refused by G5" in notes
    assert notes[-1].startswith("epoch 8 the horizon ended the episode: ")


def test_report_of_12_episodes_has_narratives_of_the_first_ten_and_states_that_2_are_omitted(
    tmp_path: Path,
) -> None:
    rows = [fake_run.run_row(episodes=12), *(row for n in range(12) for row in fake_run.episode(n))]
    section = page_of(write(tmp_path / "run", rows)).one("section", id="diary")
    assert [heading.text for heading in section.all("h3")] == [f"Episode {n}" for n in range(10)]
    assert "2 more episodes are not shown here." in section.text


def test_report_contains_the_complete_configuration_and_the_software_environment(tmp_path: Path) -> None:
    row = replace(
        fake_run.run_row(), config={"task": "digits", "rng_seed": 3, "slots": ["a", "b"], "gamma": None}
    )
    page = page_of(write(tmp_path / "run", [row]), reproduction="esper run --task digits")
    assert pairs(page.one("section", id="configuration")) == {
        "task": "digits",
        "rng_seed": "3",
        "slots": '["a", "b"]',
        "gamma": "–",
    }
    environment = pairs(page.one("section", id="environment"))
    assert environment["git revision"] == "–"
    assert environment["data hash"] == "0" * 64
    assert (environment["python"], environment["processors"]) == ("3.11", "2")
    assert page.one("section", id="command").one("pre").text == "esper run --task digits"


@pytest.mark.parametrize(
    ("revision", "expected"),
    [
        (None, "need an unknown revision of the code, the versions below"),
        ("abc123", "need revision abc123, the versions below"),
        ("abc123-dirty", "The code had changes that were not committed"),
    ],
)
def test_report_states_the_code_revision_needed_to_reproduce_the_run(
    revision: str | None, expected: str
) -> None:
    row = replace(fake_run.run_row(), git_revision=revision)
    section = command(row, "esper run")
    assert expected in section
    assert ("not committed" in section) == (revision == "abc123-dirty")


# --- comparison -------------------------------------------------------------------------------------


def control(directory: Path, **changes: Any) -> Run:
    """Write a run without growth: validation score 22.0, test score 21.25, compute 1.5 GFLOP."""
    episode = replace(
        fake_run.episode_row(),
        val_score=22.0,
        test_score=21.25,
        twin_val_score=None,
        params=250,
        flops={"forward": 500_000_000, "backward": 1_000_000_000},
    )
    row = replace(fake_run.run_row(directory.name, "off"), **changes)
    return write(directory, [row, episode])


def test_report_compares_two_runs_in_pairs_of_episodes_with_equal_random_streams(
    grown: Run, tmp_path: Path
) -> None:
    page = page_of(grown, control(tmp_path / "off"))
    assert sentences(page)[-1] == (
        "Against off, in one episode begun alike: +39.5 points on validation, +39.0 on test."
    )
    section = page.one("section", id="comparison")
    shown, *_ = section.all("tbody")
    cells = [[cell.text for cell in row.all("td")] for row in shown.all("tr")]
    assert cells == [
        ["demo (heuristic, rng seed 0)", "1", "61.5", "", "60.2", "", "398", "4.00 GFLOP", "25.0 kFLOP"],
        ["off (off, rng seed 0)", "1", "22.0", "+39.5", "21.2", "+39.0", "250", "1.50 GFLOP", "25.0 kFLOP"],
    ]
    assert facts(page)["compute of an episode"] == ("4.00 GFLOP", "×2.67 that of off")
    labels = [text.text for text in section.one("figure").all("text")]
    assert {"demo 60.2", "off 21.2"} <= set(labels)
    assert section.one("details", id="differences").table == [
        {"setting": "controller", "demo": "heuristic", "off": "off"}
    ]


def test_report_appends_a_number_to_the_name_of_a_compared_run_with_the_same_name(grown: Run) -> None:
    section = page_of(grown, grown).one("section", id="comparison")
    shown, *_ = section.all("tbody")
    names = [next(iter(row.all("td"))).text for row in shown.all("tr")]
    assert names == ["demo (heuristic, rng seed 0)", "demo (2) (heuristic, rng seed 0)"]
    assert "Their configurations are the same." in section.text


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rng_seed": 7}, "their rng seeds differ: 0 here, 7 there"),
        ({"task": "other"}, "their tasks differ: digits_impaired here, other there"),
        ({"data_hash": "1" * 64}, "their data differ: 00000000 here, 11111111 there"),
        ({"horizon": 9}, "their horizons differ: 8 here, 9 there"),
    ],
)
def test_report_gives_the_reason_if_episodes_of_two_runs_cannot_be_paired(
    grown: Run, tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    found = compare(grown, control(tmp_path / "off", **changes))
    assert comparison_text(found) == (
        f"Against off (22.0 on validation): episodes cannot be paired, since {reason}."
    )


def test_report_states_that_the_compared_run_has_no_finished_episode(grown: Run, tmp_path: Path) -> None:
    other = write(tmp_path / "off", [fake_run.run_row("off", "off")])
    assert comparison_text(compare(grown, other)) == (
        "Against off: it has no finished episode. Stopped before its first epoch was done."
    )


# --- trainings --------------------------------------------------------------------------------------


def training(iterations: int = 3, done: int | None = None) -> Iterator[Row]:
    """Yield the rows of a training with two environments, increasing scores and two policy evaluations."""
    yield replace(fake_run.run_row("taught", "ppo", iterations=iterations), envs=2)
    for number in range(1, (iterations if done is None else done) + 1):
        for env in range(2):
            for row in fake_run.episode(number - 1):
                changes: dict[str, Any] = {"env": env, "iteration": number}
                if isinstance(row, EpisodeRow):
                    score = 30.0 + 5 * number + 10 * env
                    changes |= {"val_score": score, "twin_val_score": 25.0, "total_reward": score / 100}
                yield replace(row, **changes)
        evaluated = {1: (0.5, 41.0), 2: (0.75, 44.5)}.get(number, (None, None))
        yield replace(
            fake_run.update_row(number), evaluation_return=evaluated[0], evaluation_score=evaluated[1]
        )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> str:
    return render_report(write(tmp_path_factory.mktemp("runs") / "run", training()))


def test_report_headline_of_a_training_has_the_scores_of_best_evaluation_and_last_iteration(
    trained: str,
) -> None:
    """Scores 45 and 55 have standard error 5; the half-width of their 95 % interval is 12.706 · 5 = 63.5."""
    page = read_page(trained)
    assert headline(page) == (
        "The best policy, that of iteration 2, scored 44.5 in its evaluation; the 2 episodes of"
        " iteration 3 reached 50.0 ± 63.5 on validation, 25.0 ± 63.5 points above their twins that did"
        " not grow."
    )
    assert sentences(page) == [
        "Finished after iteration 3 of 3.",
        "The 2 episodes of iteration 1 reached 40.0 ± 63.5 on validation,"
        " 15.0 ± 63.5 points above their twins that did not grow.",
    ]
    assert facts(page)["best evaluation"] == ("44.5", "return +0.75, iteration 2; no twin recorded")
    assert facts(page)["validation, iteration 3"] == ("50.0 ± 63.5", "twin 25.0, +25.0 ± 63.5")


def test_report_of_a_training_shows_the_best_median_and_worst_episode(trained: str) -> None:
    """The median episode is the fourth of six by score (35, 40, 45, 45, 50, 55): that of iteration 3."""
    page = read_page(trained)
    section = page.one("section", id="lanes")
    assert [heading.text for heading in section.all("h3")] == [
        "Best episode: iteration 3, environment 1, score 55.0, twin 25.0",
        "Median episode: iteration 3, environment 0, score 45.0, twin 25.0",
        "Worst episode: iteration 1, environment 0, score 35.0, twin 25.0",
    ]
    assert len(list(section.all("svg"))) == 3
    assert [heading.text for heading in page.one("section", id="diary").all("h3")] == [
        "Best episode: iteration 3, environment 1, score 55.0, twin 25.0"
    ]


def test_report_of_a_training_counts_failed_episodes_and_excludes_them_from_mean_scores(
    tmp_path: Path,
) -> None:
    def broken(env: int) -> list[Row]:
        return [
            replace(row, ended_by="governor", val_score=1.0)
            if isinstance(row, EpisodeRow) and (row.episode, row.env) in ((2, 1), (2, env))
            else row
            for row in training()
        ]

    found = conclude(write(tmp_path / "one", broken(1)))
    assert Fact("validation, iteration 3", "45.0", "twin 25.0, +20.0") in found.facts
    assert "One episode of iteration 3 broke down and is not counted." in found.sentences
    assert "; the one episode of iteration 3 reached 45.0 on validation, 20.0 points" in found.headline
    found = conclude(write(tmp_path / "all", broken(0)))
    assert found.headline == "Every episode of iteration 3 broke down, so there is no result."


def test_report_headline_of_a_training_without_evaluation_has_the_score_of_its_last_episodes(
    tmp_path: Path,
) -> None:
    rows = [replace(row, evaluation_return=None) if isinstance(row, UpdateRow) else row for row in training()]
    found = conclude(write(tmp_path / "run", rows))
    assert found.headline.startswith("The 2 episodes of iteration 3 reached 50.0 ± 63.5 on validation, 25.0")
    assert "best evaluation" not in {fact.name for fact in found.facts}


def test_report_lists_each_alert_with_its_hint_and_the_number_of_times_it_was_raised(
    tmp_path: Path, grown_page: Node
) -> None:
    page = page_of(write(tmp_path / "run", [fake_run.run_row(), fake_run.alert_row("kl")]))
    section = page.one("section", id="alerts")
    assert "open" in section.one("details").attributes
    (line,) = section.table
    columns = ("rule", "severity", "about", "times", "value", "limit", "hint")
    assert [line[name] for name in columns] == [
        *("kl", "warning", "slot r0c1", "1", "2.5", "2.25", "rolled back to epoch 3")
    ]
    section = grown_page.one("section", id="alerts")
    assert section.text == "What is wrong, and since when? No alert was raised."
