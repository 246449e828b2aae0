import re
import shutil
from pathlib import Path

import pytest

from esper.karn.answer import Answer
from esper.karn.figures import FIGURES
from esper.karn.questions.episodes import EpisodeKey
from esper.karn.questions.growth import growth
from esper.karn.questions.improvement import improvement
from esper.karn.run import open_run
from esper.karn.serve.charts import chart_of_growth, chart_of_improvement
from esper.leyline.events import EpisodeRow, EpochRow, Row, UpdateRow
from esper.nissa.writer import RunWriter
from tests.karn import fake_run, made_run
from tests.karn.serving import Client, lines_of, training, write_run
from tests.rows import change

ITERATIONS = 3


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """An episode, a training, and a run that is damaged."""
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "episode")
    write_run(folder / "nested" / "training", training(ITERATIONS), iterations=ITERATIONS, controller="ppo")
    damaged = write_run(folder / "damaged")
    with lines_of(damaged).open("a") as file:
        file.write("no row\n")
    return folder


@pytest.fixture(scope="module")
def client(runs) -> Client:
    return Client(runs)


# --- runs -----------------------------------------------------------------------------------------


def test_the_list_names_every_run_without_reading_any(client, runs):
    listed = client.ask("/api/runs").json

    assert listed["folder"] == runs.name
    assert [run["name"] for run in listed["runs"]] == ["damaged", "episode", "nested/training"]


def test_an_entry_says_what_the_questions_answer(client):
    entry = client.ask_run("episode", "/entry").json

    assert (entry["state"], entry["error"]) == ("finished", None)
    assert (entry["task"], entry["controller"]) == ("digits_impaired", "heuristic")
    # The network that the made-up episode left behind, as `esper runs` has it; its last epoch was at 62.0.
    assert (entry["score"], entry["twin"], entry["lead"]) == ("61.5", "22.0", "+39.5")
    assert entry["params"] == "×1.59"
    assert (entry["progress"], entry["share"]) == ("epoch 8/8", 1.0)
    assert entry["trend"] == "▂▃▃▄▅▆▇██"


def test_a_training_counts_iterations(client):
    entry = client.ask_run("nested/training", "/entry").json

    assert (entry["progress"], entry["controller"]) == ("iteration 3/3", "ppo")


def test_alerts_that_hold_are_counted_and_told(tmp_path):
    rows = [*fake_run.episode(), fake_run.alert_row("collapse"), fake_run.alert_row("slow")]
    write_run(tmp_path / "mine", [*rows, fake_run.alert_row("slow", "cleared")])

    entry = Client(tmp_path).ask_run("mine", "/entry").json

    (alert,) = entry["alerts"]
    assert entry["counts"] == {alert["severity"]: 1}
    assert alert["rule"] == "collapse"
    assert alert["hint"] == fake_run.alert_row().hint


def test_a_page_has_everything_but_the_figures(client):
    found = client.ask_run("nested/training").json
    page = found["page"]

    assert (found["name"], page["entry"]["controller"]) == ("nested/training", "ppo")
    assert [figure["key"] for figure in page["figures"]] == [
        figure.key for figure in FIGURES if figure.key != "progress"
    ]
    assert [figure["key"] for figure in page["figures"] if figure["of_episode"]] == ["lanes"]
    assert [(episode["env"], episode["episode"], episode["group"]) for episode in page["episodes"]] == [
        (0, 0, "iteration 1"),
        (0, 1, "iteration 2"),
        (0, 2, "iteration 3"),
    ]
    assert page["episode"] in [{"env": 0, "episode": episode} for episode in range(3)]
    assert ["iterations", "3"] in page["config"]
    assert ["git revision", "–"] in page["provenance"]
    assert "val_score" in dict(page["tables"])["epoch"]


def test_a_run_that_began_a_moment_ago_says_that_nothing_is_known(tmp_path):
    with RunWriter(tmp_path / "mine") as writer:
        writer.emit(fake_run.run_row())
        writer.flush()
        client = Client(tmp_path)
        entry = client.ask_run("mine", "/entry").json

        assert (entry["state"], entry["score"], entry["lead"], entry["trend"]) == ("running", "–", "–", "")
        assert client.ask_run("mine").json["page"]["episodes"] == []
        assert client.ask_run("mine", "/diary").json == []
        for figure in FIGURES:
            assert client.ask_run("mine", f"/figures/{figure.key}").status == 200


def test_new_rows_are_seen_at_the_next_question(tmp_path):
    with RunWriter(tmp_path / "mine") as writer:
        writer.emit(fake_run.run_row())
        writer.emit(fake_run.epoch_row(1))
        writer.flush()
        client = Client(tmp_path)
        assert client.ask_run("mine", "/entry").json["score"] == "14.0"

        writer.emit(fake_run.epoch_row(2))
        writer.flush()

        assert client.ask_run("mine", "/entry").json["score"] == "22.5"


def test_a_run_that_takes_the_place_of_another_is_read_as_its_own(tmp_path):
    write_run(tmp_path / "mine", controller="first")
    client = Client(tmp_path)
    assert client.ask_run("mine", "/entry").json["controller"] == "first"

    shutil.rmtree(tmp_path / "mine")
    write_run(tmp_path / "mine", controller="second")

    assert client.ask_run("mine", "/entry").json["controller"] == "second"


def test_a_run_that_was_moved_away_is_gone(tmp_path):
    write_run(tmp_path / "mine")
    client = Client(tmp_path)
    id = client.id_of("mine")
    shutil.rmtree(tmp_path / "mine")

    answer = client.ask(f"/api/runs/{id}/entry")

    assert answer.status == 404
    assert answer.error == f"there is no run '{id}' in this folder; it may have been moved away"


# --- figures, episodes, diaries ----------------------------------------------------------------------


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.key)
@pytest.mark.parametrize("name", ["episode", "nested/training"])
def test_a_figure_is_the_picture_of_the_run(client, runs, figure, name):
    shown = client.ask_run(name, f"/figures/{figure.key}").json
    picture = figure.answer(open_run(runs / name))

    if picture is None:
        assert shown is None
    else:
        assert (shown["svg"], shown["caption"]) == (picture.svg, picture.caption)
        assert (shown["columns"], shown["rows"]) == (picture.columns, picture.rows)


def test_a_chosen_episode_is_shown(client, runs):
    (lanes,) = [figure for figure in FIGURES if figure.key == "lanes"]
    shown = client.ask_run("nested/training", "/figures/lanes?env=0&episode=1").json

    assert shown["svg"] == lanes.answer(open_run(runs / "nested/training"), EpisodeKey(0, 1)).svg
    assert shown["caption"].startswith("Iteration 2")


@pytest.mark.parametrize(
    "episode", ["env=0", "episode=1", "env=x&episode=0", "env=1.5&episode=0", "env=&episode="]
)
def test_an_episode_that_is_none_is_a_sentence(client, episode):
    answer = client.ask_run("episode", f"/figures/lanes?{episode}")

    assert answer.status == 400
    assert answer.error == "an episode is named by two whole numbers, such as ?env=0&episode=3"


def test_an_unknown_figure_is_named_with_the_nearest(client):
    answer = client.ask_run("episode", "/figures/lane")

    assert answer.status == 400
    assert answer.error.startswith("unknown figure 'lane'; did you mean lanes?")


def test_a_chart_holds_the_numbers_of_its_figure(client, runs):
    shown = client.ask_run("episode", "/figures/growth").json

    score, twin = shown["chart"]["plots"][0]["lines"]
    assert (score["label"], score["values"]) == ("score", [10.0, *fake_run.SCORES[1:]])
    assert (twin["look"], twin["values"]) == ("ghost", list(fake_run.TWIN_SCORES))
    at = shown["columns"].index("score")
    assert score["texts"] == [row[at] for row in shown["rows"]]
    assert shown["chart"]["places"] == [row[0] for row in shown["rows"]]


def test_a_training_has_a_fan_only_where_episodes_lie_side_by_side(runs):
    found = chart_of_growth(growth(open_run(runs / "nested/training")))

    assert (found.axis, found.end, found.x) == ("iteration", 3, [1, 2, 3])
    assert found.plots[0].fans == []


def test_returns_and_their_evaluations_are_charted(runs):
    found = chart_of_improvement(improvement(open_run(runs / "nested/training")))

    assert [line.label for line in found.plots[0].lines] == ["median return"]
    assert found.x == [1, 2, 3]


def test_a_diary_tells_the_episode(client):
    notes = client.ask_run("episode", "/diary?env=0&episode=0").json

    kept = next(note for note in notes if note["stage"] == "fossilized")
    assert (kept["epoch"], kept["glyph"]) == (0, "◆")
    assert "conv_light germinated in r0c0" in kept["text"]


# --- two runs -------------------------------------------------------------------------------------


def test_two_runs_are_compared_by_setting_and_by_score(tmp_path):
    write_run(tmp_path / "one")
    write_run(tmp_path / "two", controller="off")
    client = Client(tmp_path)

    found = client.ask(f"/api/comparisons/{client.id_of('one')}/{client.id_of('two')}").json

    assert ["controller", "heuristic", "off"] in found["differences"]
    assert [row[0] for row in found["verdict"]["rows"]] == ["one", "two"]
    assert found["sentence"]


def test_a_comparison_with_a_damaged_run_says_which_one_it_is(client):
    answer = client.ask(f"/api/comparisons/{client.id_of('episode')}/{client.id_of('damaged')}")

    assert answer.status == 400
    assert answer.error.startswith("'damaged' cannot be read: telemetry/rows-00000.jsonl, line 49,")


# --- damage ---------------------------------------------------------------------------------------


def test_a_damaged_run_has_an_error_and_the_others_work(client):
    sentence = (
        "'damaged' cannot be read: telemetry/rows-00000.jsonl, line 49, is not a row: it must begin with"
    )

    entry = client.ask_run("damaged", "/entry").json
    assert entry["state"] == "unreadable"
    assert entry["error"].startswith(sentence)
    page = client.ask_run("damaged").json
    assert page["name"] == "damaged"
    assert page["page"]["entry"]["error"].startswith(sentence)
    assert client.ask_run("damaged", "/figures/growth").error.startswith(sentence)
    assert client.ask_run("episode", "/entry").json["error"] is None


@pytest.mark.parametrize(
    "damage", [b"\xff\xfe\x00", b'{"t": NaN}', b"[]", b"null", b'{"t":1e400}', b"{" * 10_000]
)
@pytest.mark.parametrize("begin", [b"", b'{"table":"run",', b'{"table":"epoch",'])
def test_no_content_of_a_file_breaks_the_page(tmp_path, begin, damage):
    write_run(tmp_path / "fine")
    damaged = write_run(tmp_path / "damaged")
    lines_of(damaged).write_bytes(begin + damage + b"\n")
    client = Client(tmp_path)

    assert client.ask_run("damaged", "/entry").json["state"] == "unreadable"
    assert client.ask_run("fine", "/entry").json["state"] == "finished"


def test_rows_that_contradict_each_other_break_only_what_they_are_shown_in(tmp_path, caplog):
    row = fake_run.transition_row(1, 0, fake_run.D, fake_run.G, "policy", "germinated")
    change(row, to_stage=77)
    write_run(tmp_path / "mine", [*fake_run.episode(), row])
    client = Client(tmp_path)

    answer = client.ask_run("mine", "/figures/lanes")

    assert answer.status == 400
    assert answer.error == "'mine' cannot be shown: ValueError: 77 is not a valid Stage"
    assert "'mine' broke the page" in caplog.text
    assert client.ask_run("mine", "/figures/growth").status == 200


def test_a_run_that_is_repaired_is_read_again(tmp_path):
    run = write_run(tmp_path / "mine")
    whole = lines_of(run).read_bytes()
    lines_of(run).write_bytes(b"no row\n")
    client = Client(tmp_path)
    assert client.ask_run("mine", "/entry").json["state"] == "unreadable"

    lines_of(run).write_bytes(whole)

    assert client.ask_run("mine", "/entry").json["state"] == "finished"


# --- two runs -------------------------------------------------------------------------------------------


SHARED = [figure.key for figure in FIGURES if figure.draw_beside is not None]


def axes_of(shown: dict) -> list[tuple[str, ...]]:
    """The numbers at the axes and the healthy bands, each with its place."""
    number = r'<text x="([^"]+)" y="([^"]+)" class="dim" text-anchor="(?:end|middle)">(-?[\d.]+k?)</text>'
    band = r'<rect x="([^"]+)" y="([^"]+)" width="[^"]+" height="([^"]+)" class="inband"/>'
    return re.findall(number, shown["svg"]) + re.findall(band, shown["svg"])


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Client:
    """Two trainings of unequal length, of which one scores and is paid more; and one that is damaged."""
    folder = tmp_path_factory.mktemp("pair")
    for name, iterations, more in (("short", 3, 0.0), ("long", 7, 30.0)):
        rows = made_run.training_rows(iterations=iterations, envs=3, horizon=10 + iterations)
        rows.append(made_run.alert_row("kl_high", iteration=2))
        for row in rows:
            if isinstance(row, EpisodeRow):
                change(row, val_score=more + 0.5 * row.val_score)
                change(row, total_reward=row.total_reward + more)
            if isinstance(row, EpochRow):
                change(row, val_score=more + 0.5 * row.val_score, twin_score=0.5 * row.twin_score)
            if isinstance(row, UpdateRow):
                change(row, approx_kl=(row.approx_kl or 0.0) + more)
                change(row, phase_ms={phase: ms * (1 + more) for phase, ms in row.phase_ms.items()})
                change(
                    row, reward_terms={term: (paid or 0.0) - more for term, paid in row.reward_terms.items()}
                )
        made_run.write(folder / name, rows)
    damaged = write_run(folder / "damaged")
    with lines_of(damaged).open("a") as file:
        file.write("no row\n")
    return Client(folder)


@pytest.mark.parametrize("key", SHARED)
def test_figures_beside_each_other_have_the_same_axes(pair, key):
    short, long = (
        pair.ask_run(name, f"/figures/{key}?beside={pair.id_of(other)}").json
        for name, other in (("short", "long"), ("long", "short"))
    )
    alone = pair.ask_run("short", f"/figures/{key}").json

    if key == "worth":  # one row per blueprint, so that the axis lies higher or lower
        short_axes, long_axes = ([(x, text) for x, _, text in axes_of(one)] for one in (short, long))
        assert short_axes == long_axes != []
    else:
        assert axes_of(short) == axes_of(long) != []
        assert axes_of(short) != axes_of(alone)
    assert (short["columns"], short["rows"]) == (alone["columns"], alone["rows"])
    assert short["svg"] != alone["svg"]


def test_a_run_beside_one_that_cannot_be_read_is_shown_alone(pair):
    alone = pair.ask_run("short", "/figures/lanes").json
    beside = pair.ask_run("short", f"/figures/lanes?beside={pair.id_of('damaged')}")

    assert beside.json == alone
    other = pair.ask_run("damaged", f"/figures/lanes?beside={pair.id_of('short')}")
    assert "is not a row: it must begin with the name of a table" in other.error
    assert pair.ask_run("short", "/figures/lanes?beside=nobody").status == 404


def test_an_episode_beside_a_training_counts_something_else(client):
    """Epochs and iterations share no axis."""
    alone = client.ask_run("episode", "/figures/choices").json
    assert (
        client.ask_run("episode", f"/figures/choices?beside={client.id_of('nested/training')}").json == alone
    )


# --- a run that is resumed --------------------------------------------------------------------------


def test_a_run_that_went_back_between_two_looks_is_shown_as_it_is(tmp_path):
    """Iteration 2 is replaced by another iteration 2, so that files have the same size, and then there is a third."""

    def rows(number: int, score: float) -> list[Row]:
        episode = [*fake_run.episode(episode=number - 1), fake_run.update_row(number)]
        change(episode[-2], val_score=score)
        return episode

    def look() -> tuple[str, str, list[str], list[list[str]]]:
        entry = client.ask_run("mine", "/entry").json
        shown = client.ask_run("mine", "/figures/growth").json
        (version,) = (run["version"] for run in client.ask("/api/runs").json["runs"])
        scores = [row[shown["columns"].index("score")] for row in shown["rows"]]
        epochs = client.query("mine", "SELECT count(*) FROM epoch").json["rows"]
        return version, entry["score"], scores, epochs

    def write(writer: RunWriter, number: int, score: float) -> None:
        with writer.iteration(number):
            for row in rows(number, score):
                writer.emit(row)

    again = tmp_path / "mine" / "telemetry" / "rows-00002.jsonl"
    with RunWriter(tmp_path / "mine", clock=lambda: 1.0) as writer:
        with writer.iteration(0):
            writer.emit(fake_run.run_row(iterations=3))
        write(writer, 1, 40.5)
        with writer.checkpoint() as mark:
            pass
        write(writer, 2, 50.5)
        client = Client(tmp_path)
        before = look()
    size = again.stat().st_size
    with RunWriter(tmp_path / "mine", resume_from=mark, clock=lambda: 1.0) as writer:
        write(writer, 2, 60.5)
        assert again.stat().st_size == size
        between = look()
        write(writer, 3, 70.5)
        after = look()

    assert before[1:] == ("50.5", ["40.5", "50.5"], [["18"]])
    assert between[1:] == ("60.5", ["40.5", "60.5"], [["18"]])
    assert after[1:] == ("70.5", ["40.5", "60.5", "70.5"], [["27"]])
    assert len({before[0], between[0], after[0]}) == 3


# --- paths ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target",
    [
        "/static/../app.py",
        "/static/%2e%2e/app.py",
        "/static/..%2fapp.py",
        "/static//etc/passwd",
        "/static/vendor/../../app.py",
        "/static/",
        "/static/%00",
        "/../etc/passwd",
        "/api/runs/../runs",
        "/api/runs/%2e%2e",
        "/api/runs/%2e%2e%2flife",
        "/api/runs/..%2f..%2fetc/entry",
        "/api/runs/episode",
        "/api/runs/episode/entry",
        "/api/runs/%2fetc%2fpasswd/entry",
        "/api/runs/nested%2ftraining/entry",
        "/api/runs/%00/entry",
        "/api/runs//entry",
        "/api",
    ],
)
def test_no_path_leads_out_of_what_is_served(client, target):
    answer = client.ask(target)

    assert answer.status == 404
    assert answer.error
    assert b"root:" not in answer.body


def test_a_link_out_of_the_folder_shows_nothing_of_what_it_leads_to(tmp_path):
    outside = write_run(tmp_path / "outside", controller="secret")
    inside = write_run(tmp_path / "runs" / "mine")
    lines_of(inside).unlink()
    lines_of(inside).symlink_to(lines_of(outside))
    client = Client(tmp_path / "runs")

    answers = [client.ask_run("mine", rest) for rest in ("", "/entry", "/figures/growth", "/diary")]
    answers.append(client.query("mine", "SELECT * FROM run"))

    for answer in answers:
        assert b"secret" not in answer.body
        assert b"links are not followed" in answer.body


# --- SQL ------------------------------------------------------------------------------------------


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_query_is_answered_in_texts(client):
    answer = client.query(
        "episode", "SELECT epoch, val_score, NULL AS nothing, [1, 2] AS list FROM epoch WHERE epoch = 2"
    )

    assert answer.json == {
        "columns": ["epoch", "val_score", "nothing", "list"],
        "rows": [["2", "22.5", "–", "[1, 2]"]],
        "note": None,
    }


@pytest.mark.parametrize(
    "query",
    [
        "SELECT 1; DROP TABLE epoch",
        "DROP VIEW epoch",
        "COPY (SELECT 1) TO '{out}'",
        "ATTACH '{out}' AS other",
        "LOAD httpfs",
        "SET enable_external_access = true",
        "SELECT * FROM read_text('/etc/passwd')",
        "SELECT * FROM read_csv('{secret}')",
        "SELECT getenv('PATH')",
        "",
        "'",
    ],
)
def test_a_query_reads_the_run_and_does_nothing_else(runs, client, tmp_path, query):
    before = files_of(runs)
    secret = tmp_path / "secret.csv"
    secret.write_text("a\nhidden\n")

    answer = client.query("episode", query.format(out=tmp_path / "out", secret=secret))

    assert answer.status == 400
    assert len(answer.error) > 20
    assert b"root:" not in answer.body
    assert b"hidden" not in answer.body
    assert files_of(runs) == before
    assert sorted(tmp_path.iterdir()) == [secret]


def test_an_answer_of_a_hundred_megabytes_is_refused_with_a_sentence(runs, client):
    before = files_of(runs)

    answer = client.query("episode", "SELECT repeat('x', 100000) FROM range(1000)")

    assert answer.status == 400
    assert answer.error == (
        "the answer is larger than 4 MB; add a LIMIT, name fewer columns, or aggregate with count, avg and"
        " GROUP BY"
    )
    assert files_of(runs) == before
    assert client.query("episode", "SELECT 1").json["rows"] == [["1"]]


def test_of_many_rows_the_first_are_shown_and_the_answer_says_so(client):
    answer = client.query("episode", "SELECT * FROM range(1000000000)").json

    assert [row for (row,) in answer["rows"]] == [str(number) for number in range(1000)]
    assert answer["note"] == "only the first 1,000 rows are shown"


def test_a_query_that_takes_too_long_is_ended_with_a_sentence(client, monkeypatch):
    monkeypatch.setattr("esper.karn.serve.api.MOST_SECONDS", 0.5)

    answer = client.query("episode", "SELECT count(*) FROM range(1000000) a, range(1000000) b")

    assert answer.status == 400
    assert answer.error == "the query took longer than 0.5 s; ask for less"


def test_one_query_at_a_time_is_worked_on(client, monkeypatch):
    within: list[str] = []

    class Busy:
        def untrusted(self, query: str, **limits: object) -> Answer:
            within.append(client.query("episode", "SELECT 2").error)
            return Answer(columns=["1"], types=["INTEGER"], rows=[[1]], note=None)

    monkeypatch.setattr("esper.karn.serve.api.open_run", lambda path: Busy())
    first = client.query("episode", "SELECT 1").json
    second = client.query("episode", "SELECT 1").json

    assert within == ["another query is running; wait for its answer"] * 2
    assert first["rows"] == second["rows"] == [["1"]]


@pytest.mark.parametrize(
    ("headers", "body", "sentence"),
    [
        ({}, b'{"query": "SELECT 1"}', "a query is sent as application/json"),
        ({"content-type": "text/plain"}, b'{"query": "SELECT 1"}', "a query is sent as application/json"),
        (
            {"content-type": "application/x-www-form-urlencoded"},
            b"query=SELECT+1",
            "a query is sent as application/json",
        ),
        ({"content-type": "application/json"}, b"SELECT 1", 'a query is sent as {"query": "SELECT 1"}'),
        ({"content-type": "application/json"}, b'{"query": 1}', 'a query is sent as {"query": "SELECT 1"}'),
        ({"content-type": "application/json"}, b'{"query": "", "x": 1}', "a query is sent as"),
        ({"content-type": "application/json"}, b"\xff", "a query is sent as"),
        ({"content-type": "application/json"}, b"x" * 200_000, "a query has at most 100,000 bytes"),
    ],
)
def test_what_is_not_a_query_in_json_is_a_sentence(client, headers, body, sentence):
    answer = client.ask(f"/api/runs/{client.id_of('episode')}/sql", "POST", headers, body)

    assert answer.status == 400
    assert answer.error.startswith(sentence)


def test_a_query_is_never_asked_by_get(client):
    assert client.ask_run("episode", "/sql?query=SELECT+1").status == 405


def test_a_query_of_a_damaged_run_says_why_it_cannot_be_answered(client):
    answer = client.query("damaged", "SELECT * FROM epoch")

    assert answer.status == 400
    assert answer.error.startswith("telemetry/rows-00000.jsonl, line 49, is not a row: it must begin with")
