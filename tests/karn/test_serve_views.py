"""Web pages of ``esper serve``: statistics of runs, and no access to files outside the folder of runs."""

import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from esper.karn.figures import figure_named
from esper.karn.page.sections import SHOWN
from esper.karn.questions.episode_selection import EpisodeKey
from esper.karn.run import open_run
from esper.leyline.rows import EpisodeRow, EpochRow, Row, UpdateRow
from esper.nissa.writer import RunWriter
from tests.karn import fake_run, made_run
from tests.karn.serving import Client, damage, facts, lines_of, training, write_run

DAMAGED = "is not a row: it must begin with the name of a table"


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Write three runs: one with a single episode, one policy training and one damaged run."""
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "episode")
    write_run(folder / "nested" / "training", training(3), iterations=3, controller="ppo")
    damage(write_run(folder / "damaged"))
    return folder


@pytest.fixture(scope="module")
def client(runs) -> Client:
    return Client(runs)


# --- list of runs -----------------------------------------------------------------------------------


def test_served_list_of_runs_shows_state_progress_and_scores_of_every_run(client):
    rows = client.rows()

    assert set(rows) == {"damaged", "episode", "nested/training"}
    cells = [cell.text for cell in rows["episode"].all("td")]
    # The list of runs shows the score 61.5 of the committed network, not the score 62.0 of the last epoch.
    assert cells[2:] == [
        *("finished", "digits_impaired", "heuristic", "epoch 8/8", "–", "▂▃▃▄▅▆▇██"),
        *("61.5", "22.0", "+39.5", "×1.59", "", "2030-01-01 00:00"),
    ]
    assert "iteration 3/3" in rows["nested/training"].text
    assert "unreadable" in rows["damaged"].text
    assert DAMAGED in rows["damaged"].text


def test_served_list_shows_runs_as_pending_if_they_were_not_read_within_the_time_limit(
    client, runs, monkeypatch
):
    client.rows()
    monkeypatch.setattr("esper.karn.serve.app.SECONDS_FOR_ROWS", -1.0)

    unread = Client(runs).rows(patiently=False)
    assert {row.attributes.get("class") for row in unread.values()} == {"pending"}
    # The list shows cached summaries of runs even if no time is left to read runs.
    assert "61.5" in client.rows()["episode"].text


def test_served_list_of_runs_explains_how_to_start_a_run_if_the_folder_is_empty(tmp_path):
    assert f"esper run --out {tmp_path.name}/mine" in Client(tmp_path).ask("/").html.text


# --- page of one run --------------------------------------------------------------------------------


def test_web_page_of_a_run_requests_only_sections_that_the_server_has(client):
    for name in ("episode", "nested/training"):
        page = client.ask(f"/runs/{client.id_of(name)}").html
        parts = [node.attributes["data-part"] for node in page.all() if "data-part" in node.attributes]
        keys = [part.rpartition("/")[2] for part in parts]

        assert [key for key in keys if key in SHOWN] == list(SHOWN)
        assert {"head", "conclusion", "diary", "configuration", "environment"} < set(keys)
        for part in parts:
            answer = client.ask(part)
            assert answer.status == 200, part
            assert not list(answer.html.all(role="alert")), part


def test_open_alerts_are_shown_on_the_web_page_of_a_run_and_counted_in_the_list_of_runs(tmp_path):
    rows = [*fake_run.episode(), fake_run.alert_row("collapse"), fake_run.alert_row("slow")]
    write_run(tmp_path / "mine", [*rows, fake_run.alert_row("slow", "cleared")])
    client = Client(tmp_path)

    (alert,) = client.part("mine", "head").html.one(class_="alerts").all("li")
    assert alert.text.startswith("collapse")
    assert fake_run.alert_row().hint in alert.text
    assert client.rows()["mine"].one(class_="alert-warning").text == "1"


@pytest.mark.parametrize("key", SHOWN)
@pytest.mark.parametrize("name", ["episode", "nested/training"])
def test_chart_on_the_web_page_equals_the_chart_drawn_from_the_run(client, runs, key, name):
    shown = client.part(name, key)
    picture = figure_named(key).answer(open_run(runs / name))

    if picture is None:
        assert shown.html.one(class_="nothing").text == "nothing to show"
    elif picture.rows:
        assert picture.svg in shown.body.decode()
        cells = [[cell.text for cell in row.all("td")] for row in shown.html.one("tbody").all("tr")]
        assert cells == [[" ".join(cell.split()) for cell in row] for row in picture.rows]


def test_web_page_shows_the_selected_episode_with_links_to_the_previous_and_next_episode(client, runs):
    lanes = figure_named("lanes").answer(open_run(runs / "nested/training"), EpisodeKey(0, 1))
    shown = client.part("nested/training", "lanes?at=0-1-0")

    assert lanes.svg in shown.body.decode()
    steps = {one.attributes["rel"]: one.attributes["href"] for one in shown.html.all("a")}
    assert steps == {"prev": "?at=0-0-0", "next": "?at=0-2-0"}
    assert [one.text for one in shown.html.all("option")] == [f"iteration {number}" for number in (1, 2, 3)]
    assert "fossilized at 5" in client.part("nested/training", "diary?at=0-1-0").html.text


@pytest.mark.parametrize("at", ["0", "0-1", "x-0-0", "1.5-0-0", "0-0-0-0", "--"])
def test_server_refuses_a_request_for_a_malformed_episode_id(client, at):
    answer = client.part("episode", f"lanes?at={at}")

    assert (answer.status, answer.error) == (
        400,
        "an episode is named by env, episode and attempt, such as ?at=0-3-0",
    )


def test_error_for_an_unknown_section_of_the_web_page_suggests_the_nearest_section(client):
    answer = client.part("episode", "lane")

    assert answer.status == 404
    assert answer.error.startswith("unknown part of a page 'lane'; did you mean lanes?")


def test_web_page_of_a_new_run_shows_dashes_for_scores_until_the_first_epoch_row(tmp_path):
    with RunWriter(tmp_path / "mine") as writer:
        writer.emit(fake_run.run_row())
        writer.flush()
        client = Client(tmp_path)

        head = client.part("mine", "head").html
        assert head.one(class_="state").text == "running"
        assert (facts(head)["score"], facts(head)["lead"], facts(head)["left"]) == ("–", "–", "–")
        for key in (*SHOWN, "diary"):
            assert client.part("mine", key).status == 200
        writer.emit(fake_run.epoch_row(1))
        writer.flush()
        assert facts(client.part("mine", "head").html)["score"] == "14.0"


@pytest.mark.parametrize("address", ["/runs/unknown", "/runs/unknown/head"])
def test_server_refuses_a_request_for_an_unknown_run(client, address):
    answer = client.ask(address)

    assert answer.status == 404
    assert answer.error == "there is no run 'unknown' in this folder; it may have been moved away"


# --- comparison of two runs -------------------------------------------------------------------------


def axes_of(body: bytes) -> list[tuple[str, ...]]:
    """Return the axis labels and the shaded normal ranges of an SVG chart, with their positions."""
    number = r'<text x="([^"]+)" y="([^"]+)" class="dim" text-anchor="(?:end|middle)">(-?[\d.]+k?)</text>'
    band = r'<rect x="([^"]+)" y="([^"]+)" width="[^"]+" height="([^"]+)" class="inband"/>'
    return re.findall(number, body.decode()) + re.findall(band, body.decode())


def changed(row: Row, more: float) -> Row:
    """Return a copy of a telemetry row with changed scores, rewards, KL and times, which increase with
    ``more``."""
    if isinstance(row, EpisodeRow):
        score, reward = more + 0.5 * row.val_score, (row.total_reward or 0.0) + more
        return replace(row, val_score=score, total_reward=reward, params=int(row.params + more))
    if isinstance(row, EpochRow):
        twin = 0.5 * (row.twin_score or 0.0)
        return replace(row, val_score=more + 0.5 * row.val_score, twin_score=twin)
    if isinstance(row, UpdateRow):
        return replace(
            row,
            approx_kl=(row.approx_kl or 0.0) + more,
            val_score=more,
            phase_ms={phase: ms * (1 + more) for phase, ms in row.phase_ms.items()},
            reward_terms={term: (value or 0.0) - more for term, value in row.reward_terms.items()},
        )
    return row


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Client:
    """Write two training runs of different length and score, and one damaged run."""
    folder = tmp_path_factory.mktemp("pair")
    for name, iterations, more in (("short", 3, 0.0), ("long", 7, 30.0)):
        rows = made_run.training_rows(iterations=iterations, envs=3, horizon=10 + iterations)
        rows.append(made_run.alert_row("kl_high", iteration=2))
        made_run.write(folder / name, [changed(row, more) for row in rows])
    damage(write_run(folder / "damaged"))
    return Client(folder)


@pytest.mark.parametrize("key", [key for key in SHOWN if key != "interactions"])
def test_charts_of_two_compared_runs_have_the_same_axes_on_the_web_page(pair, key):
    short, long = (
        pair.part(name, f"{key}?compared={pair.id_of(other)}").body
        for name, other in (("short", "long"), ("long", "short"))
    )
    alone = pair.part("short", key).body

    # The chart of contributions has one row per blueprint, so its y coordinates differ between runs.
    if key == "worth":
        short_axes, long_axes = ([(x, text) for x, _, text in axes_of(one)] for one in (short, long))
        assert short_axes == long_axes != []
    else:
        assert axes_of(short) == axes_of(long) != []
        assert axes_of(short) != axes_of(alone)


def test_chart_of_a_run_compared_with_a_damaged_run_is_that_of_the_intact_run_alone(pair):
    alone = pair.part("short", "growth").body

    assert pair.part("short", f"growth?compared={pair.id_of('damaged')}").body == alone
    assert DAMAGED in pair.part("damaged", f"growth?compared={pair.id_of('short')}").error
    assert pair.part("short", "growth?compared=unknown").status == 404


def test_chart_of_a_run_does_not_share_its_axes_with_a_compared_policy_training(client):
    """Charts of a policy training have an axis of iterations; charts of other runs have an axis of epochs."""
    compared = client.part("episode", f"choices?compared={client.id_of('nested/training')}").body
    assert compared == client.part("episode", "choices").body


def test_comparison_page_has_every_chart_for_each_of_two_runs(tmp_path):
    write_run(tmp_path / "one")
    write_run(tmp_path / "two", controller="off")
    client = Client(tmp_path)
    both = f"run={client.id_of('one')}&run={client.id_of('two')}"

    page = client.ask(f"/compare?{both}").html
    sources = [node.attributes["data-part"] for node in page.all() if "data-part" in node.attributes]
    assert len(sources) == 2 + 1 + 2 * len(SHOWN)
    assert {client.ask(source).status for source in sources} == {200}
    found = client.ask(f"/comparison?{both}").html
    shown, *_ = found.all("tbody")
    assert [row.text.split()[0] for row in shown.all("tr")] == ["one", "two"]
    assert found.one(class_="headline").text.startswith("Against demo, in one episode begun alike: +0.0")


def test_server_refuses_a_comparison_page_with_a_damaged_or_missing_run(client):
    episode, damaged = client.id_of("episode"), client.id_of("damaged")

    assert "'damaged' cannot be read" in client.ask(f"/comparison?run={episode}&run={damaged}").error
    answer = client.ask(f"/compare?run={episode}")
    assert (answer.status, answer.error) == (400, "two runs are compared; 1 were named")


# --- damaged runs -----------------------------------------------------------------------------------


def test_web_page_of_a_damaged_run_shows_the_reason_in_every_section(client):
    assert client.ask(f"/runs/{client.id_of('damaged')}").status == 200
    for key in ("head", "conclusion", "growth", "diary"):
        answer = client.part("damaged", key)
        assert answer.error.startswith("'damaged' cannot be read: telemetry/")
        assert DAMAGED in answer.error
        assert b"<script" not in answer.body


def test_served_list_shows_runs_with_malformed_telemetry_files_as_unreadable(tmp_path):
    write_run(tmp_path / "fine")
    contents = [b"\xff\xfe\x00", b'{"t": NaN}', b"[]", b"null", b'{"t":1e400}', b"{" * 10_000]
    for number, content in enumerate(contents):
        lines_of(write_run(tmp_path / f"broken-{number}", [])).write_bytes(content + b"\n")
    rows = Client(tmp_path).rows()

    assert "finished" in rows.pop("fine").text
    assert [name for name, row in rows.items() if "unreadable" not in row.text] == []


def test_invalid_stage_in_a_transition_row_breaks_only_the_web_page_sections_that_read_the_row(tmp_path):
    row = fake_run.transition_row(1, 0, fake_run.D, fake_run.G, "policy", "germinated")
    write_run(tmp_path / "mine", [*fake_run.episode(), replace(row, to_stage=77)])
    client = Client(tmp_path)

    reason = "row 16 of table 'transition' is damaged: to_stage is 77, and must be 0 to 9"
    assert client.part("mine", "lanes").error == f"'mine' cannot be read: {reason}"
    assert not list(client.part("mine", "growth").html.all(role="alert"))


# --- path traversal ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target",
    [
        "/static/../app.py",
        "/static/%2e%2e/app.py",
        "/static/..%2fapp.py",
        "/static//etc/passwd",
        "/static/",
        "/static/%00",
        "/../etc/passwd",
        "/runs/../runs",
        "/runs/%2e%2e%2fepisode",
        "/runs/..%2f..%2fetc/head",
        "/runs/episode",
        "/runs/episode/head",
        "/runs/%2fetc%2fpasswd/head",
        "/runs/nested%2ftraining/head",
        "/runs/%00/head",
        "/runs//head",
        "/compare?run=episode&run=%2fetc",
    ],
)
def test_server_reads_no_file_outside_the_served_folder_for_any_url_path(client, target):
    answer = client.ask(target)

    assert answer.status == 404
    assert answer.error
    assert b"root:" not in answer.body


def test_server_shows_nothing_of_a_file_behind_a_symlink_out_of_the_served_folder(tmp_path):
    outside = write_run(tmp_path / "outside", controller="secret")
    inside = write_run(tmp_path / "runs" / "mine")
    lines_of(inside).unlink()
    lines_of(inside).symlink_to(lines_of(outside))
    client = Client(tmp_path / "runs")

    for answer in [client.ask("/rows"), *(client.part("mine", key) for key in ("head", "growth", "diary"))]:
        assert b"secret" not in answer.body
        assert b"links are not followed" in answer.body
