"""Teaching a policy as a user meets it: what is left behind, resumed runs, processes, mistakes."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from esper import run_state, teaching
from esper.config import TrainingConfig
from esper.karn.query import read_rows
from esper.leyline.errors import DivergedError, EsperError
from esper.leyline.events import EpisodeRow, RunRow, UpdateRow
from esper.nissa.part import TablePart
from esper.run_state import STATE_FILES, config_of_run
from esper.scripts import cli, train
from esper.scripts.flags import exit_on_user_error
from esper.simic.agent.ppo import PolicyDivergedError
from esper.simic.training.vectorized import RoundSummary, Trainer
from esper.tamiyo.policy.checkpoint import load_policy, save_tensors, seal
from esper.teaching import settings_of, task_of, teach
from esper.tolaria import twin
from esper.tolaria.twin import twin_scores
from tests.integration.test_killed import assert_same_end, prepare
from tests.tolaria.building import bits, tiny_task

DIGITS = ["--envs", "6", "--rounds", "3", "--steps", "3", "--hidden-dim", "16", "--evaluate-lives", "2"]
DIGITS += ["--evaluate-every", "2", "--checkpoint-every", "1"]
"""Six environments are a shard of four and one of two."""
TINY = TrainingConfig(
    task="tiny",
    reward_family="loss",
    envs=2,
    rounds=3,
    hidden_dim=16,
    passes=2,
    evaluate_every=1,
    evaluate_lives=1,
    checkpoint_every=1,
)


@pytest.fixture(scope="module", autouse=True)
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Twins are kept for all tests of this file, and nowhere in a home directory."""
    with pytest.MonkeyPatch.context() as patch:
        prepare(tmp_path_factory.mktemp("cache"), patch)
        yield


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("digits") / "run"
    cli.main(["train", *DIGITS, "--out", str(out)])
    return out


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    teach(TINY, out)
    return out


class StoppedError(Exception):
    """Ends a run in the middle."""


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the checkpoint of its second round and the rows of its third."""
    out = tmp_path_factory.mktemp("stopped") / "run"

    def stop(summary: RoundSummary) -> None:
        if summary.round == 3:
            raise StoppedError

    with pytest.raises(StoppedError):
        teach(TINY, out, on_round=stop)
    return out


@pytest.fixture
def stopped(stopped_run: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    shutil.copytree(stopped_run, tmp_path / "run")
    return tmp_path / "run"


def everything_in(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def sentence_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Run a command that has to be refused: the one sentence that it ends with."""
    return sentence_from(capsys, lambda: cli.main(words))


def sentence_from(capsys: pytest.CaptureFixture[str], command: Callable[[], None]) -> str:
    with pytest.raises(SystemExit) as stop:
        exit_on_user_error(command)
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("esper: ")
    assert said.count("\n") == 1
    return said


def refusal_to_resume(capsys: pytest.CaptureFixture[str], run: Path) -> str:
    """The sentence of a refused resume, which leaves every file as it was."""
    before = everything_in(run)
    said = sentence_of(capsys, "train", "--resume", str(run))
    assert everything_in(run) == before
    return said


# --- what a run leaves behind ---------------------------------------------------------------------


def test_a_training_run_leaves_rows_a_best_policy_and_its_configuration(digits_run: Path) -> None:
    (run,) = read_rows(digits_run, RunRow)
    assert (run.decider, run.task) == ("ppo", "digits_impaired")
    rows = read_rows(digits_run, UpdateRow)
    assert [row.round for row in rows] == [1, 2, 3]
    assert [row.evaluation_score is not None for row in rows] == [False, True, True]
    assert all(row.first_ratio_error < 1e-5 for row in rows)
    assert json.loads((digits_run / "config.json").read_text())["envs"] == 6
    assert load_policy(digits_run / "best").num_slots == 3


def test_a_trained_policy_decides_like_any_other_decider(digits_run: Path, tmp_path: Path) -> None:
    words = ["run", "--decider", "ppo", "--checkpoint", str(digits_run / "best"), "--steps", "3"]
    cli.main([*words, "--out", str(tmp_path / "run")])
    assert len(read_rows(tmp_path / "run", EpisodeRow)) == 1


def test_an_evaluation_names_every_control(digits_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--lives", "2", "--steps", "2", "--processes", "1"]
    cli.main(["eval", str(digits_run / "best"), *words])
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("ppo", "heuristic", "random", "off"))


def test_rent_is_taken_off_for_what_was_grown_and_off_grows_nothing(
    digits_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--lives", "2", "--steps", "6", "--processes", "1", "--rent", "1"]
    cli.main(["eval", str(digits_run / "best"), *words])
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    estimates = {arm: re.findall(r"-?[\d.]+ ±", rows[arm]) for arm in ("heuristic", "off")}
    assert estimates["off"][0] == estimates["off"][2]
    bare, _, paid, _ = (float(text.split()[0]) for text in estimates["heuristic"])
    params = int(rows["heuristic"].replace(",", "").split()[7]) - 174
    assert bare - paid == pytest.approx(100 * params / 1000, abs=0.2)


def test_two_processes_give_the_same_run_bit_for_bit(digits_run: Path, tmp_path: Path) -> None:
    cli.main(["train", *DIGITS, "--processes", "2", "--out", str(tmp_path / "run")])
    assert_same_end(digits_run, tmp_path / "run")


def test_the_module_form_trains_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--episodes", "1", "--max-epochs", "2", "--seed", "42", "--envs", "2", "--hidden-dim", "16"]
    train.main(["ppo", *words, "--evaluate-lives", "1"])
    (run,) = (tmp_path / "runs").iterdir()
    assert [row.round for row in read_rows(run, UpdateRow)] == [1]


def test_a_file_gives_settings_and_flags_override_it(tmp_path: Path) -> None:
    file = tmp_path / "small.toml"
    file.write_text("envs = 4\nrounds = 9\nsteps = 2\nhidden_dim = 16\nevaluate_lives = 1\n")
    cli.main(["train", "--config", str(file), "--rounds", "1", "--out", str(tmp_path / "run")])
    kept = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (kept["envs"], kept["rounds"], kept["hidden_dim"]) == (4, 1, 16)


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        (["train", "--task", "digit"], ["unknown task 'digit'"]),
        (["train", "--envs", "0", "--clip", "2"], ["envs", "clip"]),
        (["train", "--envs", "6", "--processes", "5"], ["5 processes were asked for", "1 to 2 are possible"]),
        (["train", "--envs", "6", "--processes", "0"], ["0 processes were asked for", "1 to 2 are possible"]),
        (["train", "--slots", "3", "--capacity", "2"], ["room for 2 slots", "a host with 3"]),
        (["train", "--resume", "nowhere"], ["'nowhere' is no training run"]),
        (["eval", "nowhere"], ["'nowhere' holds no checkpoint"]),
        (["run", "--decider", "ppo"], ["--checkpoint"]),
        (["run", "--checkpoint", "x"], ["checkpoint is read by the ppo decider only"]),
    ],
)
def test_a_mistake_gets_a_sentence(
    words: list[str], fragments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    for fragment in fragments:
        assert fragment in said


def test_an_unknown_key_of_a_file_is_named_with_its_neighbour(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bad.toml"
    file.write_text('learnig_rate = 1.0\nenvs = "many"\n')
    with pytest.raises(SystemExit):
        cli.main(["train", "--config", str(file)])
    said = capsys.readouterr().err
    assert "unknown key 'learnig_rate'; did you mean learning_rate?" in said
    assert "envs" in said


def test_a_finished_run_and_other_settings_are_refused(
    digits_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["train", "--resume", str(digits_run)])
    assert "there is nothing to resume" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["train", "--resume", str(digits_run), "--envs", "4"])
    assert "a resumed run keeps its own settings" in capsys.readouterr().err


# --- resuming what cannot be resumed --------------------------------------------------------------


def test_a_run_is_resumed_from_its_last_checkpoint(undisturbed: Path, stopped: Path) -> None:
    cli.main(["train", "--resume", str(stopped)])
    assert_same_end(undisturbed, stopped)


def test_a_run_that_ends_in_the_round_after_a_checkpoint_leaves_that_one_alone(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, run_round, kept = tmp_path / "run", Trainer.run_round, {}

    def diverge(trainer: Trainer) -> RoundSummary:
        if trainer.round < 2:
            return run_round(trainer)
        kept.update(everything_in(out / "checkpoints"))
        raise PolicyDivergedError("three updates in a row")

    def check_the_last(*args: object) -> None:
        assert everything_in(out / "checkpoints").items() >= kept.items()

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "run_round", diverge)
        patch.setattr(run_state, "seal", lambda state, names: (check_the_last(), seal(state, names)))
        with pytest.raises(PolicyDivergedError):
            teach(TINY, out)
    assert (out / "checkpoints" / "latest").read_text() == "round-00002-again"
    cli.main(["train", "--resume", str(out)])
    assert_same_end(undisturbed, out)


@pytest.mark.parametrize(
    ("name", "value", "fragment"),
    [
        ("envs", 3, "envs was 2, is 3"),
        ("slots", 2, "slots was None, is 2"),
        ("vary_slots", True, "vary_slots was False, is True"),
        ("rng_seed", 1, "rng_seed was 0, is 1"),
        ("rounds", 9, "rounds was 3, is 9"),
    ],
)
@pytest.mark.parametrize("with_checkpoint", [True, False])
def test_an_edited_configuration_is_refused_by_what_was_edited(
    name: str,
    value: object,
    fragment: str,
    with_checkpoint: bool,
    stopped: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if not with_checkpoint:
        shutil.rmtree(stopped / "checkpoints")
    config = json.loads((stopped / "config.json").read_text())
    (stopped / "config.json").write_text(json.dumps({**config, name: value}))
    assert fragment in refusal_to_resume(capsys, stopped)


def test_a_foreign_directory_is_refused(
    stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    assert "is no training run" in refusal_to_resume(capsys, foreign)
    shutil.copy(stopped / "config.json", foreign)
    assert "holds no folder 'telemetry'" in refusal_to_resume(capsys, foreign)
    (foreign / "config.json").write_text("{")
    assert "is not valid JSON" in refusal_to_resume(capsys, foreign)


def test_the_checkpoint_of_another_run_is_refused(
    stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    teach(TINY.model_copy(update={"rng_seed": 1}), tmp_path / "other")
    shutil.rmtree(stopped / "checkpoints")
    shutil.copytree(tmp_path / "other" / "checkpoints", stopped / "checkpoints")
    assert "belongs to another run; different: rng_seed" in refusal_to_resume(capsys, stopped)


@pytest.mark.parametrize(
    "name",
    [
        "../../outside",
        "../../../../etc",
        "/etc",
        "round-00002/../../../outside",
        "round-2",
        "",
        "round-00002\0",
    ],
)
def test_a_pointer_out_of_the_run_is_refused(
    name: str, stopped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(stopped / "checkpoints" / "round-00002", stopped.parent / "outside")
    (stopped / "checkpoints" / "latest").write_text(name)
    said = refusal_to_resume(capsys, stopped)
    assert f"latest' must name a state such as round-00005; found {name!r}" in said


def test_a_pointer_to_nothing_and_a_lost_pointer(
    undisturbed: Path, stopped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (stopped / "checkpoints" / "latest").write_text("round-00009")
    assert "round-00009' holds no checkpoint" in refusal_to_resume(capsys, stopped)
    (stopped / "checkpoints" / "latest").unlink()
    cli.main(["train", "--resume", str(stopped)])  # from the newest state that is complete
    assert_same_end(undisturbed, stopped)


class Explosive:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("file", STATE_FILES)
@pytest.mark.parametrize("sealed", [True, False])
def test_a_pickle_in_place_of_a_file_is_not_executed(
    file: str, sealed: bool, stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state, mark = stopped / "checkpoints" / "round-00002", tmp_path / "executed"
    (state / file).write_bytes(pickle.dumps(Explosive(mark)))
    if sealed:
        seal(state, STATE_FILES)
    assert file in refusal_to_resume(capsys, stopped)
    assert not mark.exists()
    pickle.loads((state / file).read_bytes())
    assert mark.exists(), "the pickle would have left a mark"


def test_a_trained_policy_that_is_a_pickle_is_not_executed(
    undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best = tmp_path / "best"
    shutil.copytree(undisturbed / "best", best)
    (best / "policy.safetensors").write_bytes(pickle.dumps(Explosive(tmp_path / "executed")))
    said = sentence_of(capsys, "run", "--task", "tiny", "--decider", "ppo", "--checkpoint", str(best))
    assert "policy.safetensors" in said
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"round": -1}, "round"),
        ({"round": 1.5}, "round"),
        ({"round": 1}, "holds the state of round 1"),
        ({"best_return": "high"}, "best_return"),
        ({"skipped_in_a_row": None}, "skipped_in_a_row"),
        ({"detail_rounds": []}, "detail_rounds"),
        ({"settings": 3}, "settings"),
        ({"settings": {}}, "belongs to another run; different: rng_seed"),
        ({"telemetry": {"update": -5}}, "telemetry"),
        ({"telemetry": {"update": 10**9}}, "lost rows since the checkpoint"),
        ({"telemetry": ...}, "missing required field `telemetry`"),
        ({"round": ...}, "missing required field `round`"),
    ],
)
def test_progress_that_makes_no_sense_is_refused_even_under_a_good_seal(
    changes: dict[str, Any], fragment: str, stopped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = stopped / "checkpoints" / "round-00002"
    progress = {**json.loads((state / "progress.json").read_text()), **changes}
    kept = {name: value for name, value in progress.items() if value is not ...}
    (state / "progress.json").write_text(json.dumps(kept))
    assert "progress.json' is not as it was written" in refusal_to_resume(capsys, stopped)
    seal(state, STATE_FILES)
    assert fragment in refusal_to_resume(capsys, stopped)


def test_an_optimiser_of_something_else_is_refused_even_under_a_good_seal(
    stopped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = stopped / "checkpoints" / "round-00002"
    (state / "optimiser.safetensors").write_bytes(save_tensors({"heads.exp_avg": torch.zeros(3)}))
    assert "optimiser.safetensors' is not as it was written" in refusal_to_resume(capsys, stopped)
    seal(state, STATE_FILES)
    assert "does not fit its run" in refusal_to_resume(capsys, stopped)


def test_two_hundred_damaged_checkpoints_load_bit_for_bit_or_not_at_all(
    stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of_run(stopped)
    trainer = Trainer(task_of(config), settings_of(config))
    monkeypatch.setattr(teaching, "Trainer", lambda task, settings: trainer)
    monkeypatch.setattr(teaching, "train", lambda *args, **options: None)
    teach(config, stopped, resume=True)
    good = state_of(trainer)
    files = sorted(path for path in (stopped / "checkpoints").rglob("*") if path.is_file())
    rng = random.Random(0)
    refusals = []
    for number in range(200):
        file = files[number % len(files)]
        content = file.read_bytes()
        file.write_bytes(damaged(content, rng, truncate=number % 4 == 0))
        forget(trainer)
        try:
            teach(config, stopped, resume=True)
        except EsperError as error:
            refusals.append(str(error))
        else:
            assert state_of(trainer) == good, f"{file.name} was damaged and loaded"
        file.write_bytes(content)
    assert len(refusals) > 150
    assert all("checkpoints" in refusal and "\n" not in refusal for refusal in refusals)


def damaged(content: bytes, rng: random.Random, *, truncate: bool) -> bytes:
    """Cut off anywhere, or with a single bit flipped."""
    if truncate:
        return content[: rng.randrange(len(content))]
    place = rng.randrange(len(content))
    return content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]


def state_of(trainer: Trainer) -> Any:
    numbers = (trainer.round, trainer.best_return, trainer.detail_rounds, trainer.agent.skipped_in_a_row)
    return bits([numbers, trainer.policy.state_dict(), trainer.agent.optimiser.state_dict()])


def forget(trainer: Trainer) -> None:
    trainer.round, trainer.best_return, trainer.detail_rounds = -1, -1.0, -1
    trainer.agent.optimiser.state.clear()
    with torch.no_grad():
        for parameter in trainer.policy.parameters():
            parameter.zero_()


# --- a full disk ----------------------------------------------------------------------------------


def full_disk(*args: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    "file",
    [
        "best/policy.json",
        "best/policy.safetensors",
        "checkpoints/round-00002/policy.safetensors",
        "checkpoints/round-00002/optimiser.safetensors",
        "checkpoints/round-00002/seal.json",
        "checkpoints/latest",
    ],
)
def test_a_full_disk_ends_a_run_that_can_be_resumed(
    file: str, undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"

    def fill_the_disk(summary: RoundSummary) -> None:
        if summary.round == 2:
            partial = out / f"{file}.partial"
            partial.parent.mkdir(exist_ok=True)
            partial.symlink_to("/dev/full")  # takes no byte

    said = sentence_from(capsys, lambda: teach(TINY, out, on_round=fill_the_disk))
    assert (
        f"'{out / file}' cannot be written: No space left on device; what was saved before is intact" in said
    )
    assert f"esper train --resume {out}" in said
    assert (out / "checkpoints" / "latest").read_text() == "round-00001"
    assert not list(out.rglob("*.partial"))
    load_policy(out / "best")
    cli.main(["train", "--resume", str(out)])
    assert_same_end(undisturbed, out)


def test_a_disk_that_is_full_when_it_is_flushed_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "fsync", full_disk)
    said = sentence_from(capsys, lambda: teach(TINY, tmp_path / "run"))
    assert "config.json' cannot be written: No space left on device" in said
    assert not list(tmp_path.rglob("*.partial"))


def test_rows_that_cannot_be_written_end_a_run_that_can_be_resumed(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    write_out = TablePart.write_out

    def half_of_a_row(part: TablePart) -> None:
        if part._buffer and b'"round":2' in part._buffer:
            del part._buffer[20:]
            write_out(part)
            full_disk()
        write_out(part)

    with monkeypatch.context() as patch:
        patch.setattr(TablePart, "write_out", half_of_a_row)
        said = sentence_from(capsys, lambda: teach(TINY, out))
    assert "No space left on device" in said
    assert f"esper train --resume {out}" in said
    cli.main(["train", "--resume", str(out)])
    assert_same_end(undisturbed, out)


def test_an_interrupted_run_says_how_to_go_on(
    stopped: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(trainer: Trainer) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "run_round", interrupt)
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", "--resume", str(stopped)])
    assert stop.value.code == 130
    assert f"esper train --resume {stopped}" in capsys.readouterr().err


# --- twins ----------------------------------------------------------------------------------------

LIFE = {"rng_seed": 7, "env": 5, "episode": 3}


def test_a_twin_that_cannot_be_made_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def diverge(*args: object, **options: object) -> None:
        raise DivergedError("the host became non-finite")

    monkeypatch.setattr(twin, "live_without_growth", diverge)
    config = TINY.model_copy(update={"reward_family": "paired", "rng_seed": 3})
    said = sentence_from(capsys, lambda: teach(config, tmp_path / "run"))
    assert (
        "the do-nothing twin of environment 0, episode 0 could not be made: the host became non-finite"
    ) in said


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[" * 100_000,
        lambda text: "null",
        lambda text: json.dumps(json.loads(text)["scores"]),
        lambda text: cached([float("nan"), 1.0, 2.0]),
        lambda text: cached([1.0, 2.0]),
        lambda text: cached(["1.0", 2.0, 3.0]),
        lambda text: cached([None, 2.0, 3.0]),
        lambda text: json.dumps({**json.loads(text), "scores": [1.0, 2.0, 3.0]}),
    ],
    ids=["cut", "empty", "deep", "null", "no digest", "nan", "short", "string", "none", "other numbers"],
)
def test_a_damaged_twin_in_the_cache_is_made_again(
    spoil: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESPER_CACHE", str(tmp_path))
    task = tiny_task(horizon=2)
    scores = twin_scores(task, **LIFE)
    (file,) = (tmp_path / "twins").iterdir()
    kept = file.read_text()
    file.write_text(spoil(kept))
    assert twin_scores(task, **LIFE) == scores
    assert file.read_text() == kept, "and kept again"


def cached(scores: list[Any]) -> str:
    """A cache file whose digest is right."""
    return json.dumps({"scores": scores, "sha256": hashlib.sha256(json.dumps(scores).encode()).hexdigest()})


def test_a_twin_in_the_cache_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESPER_CACHE", str(tmp_path))
    task = tiny_task(horizon=2)
    scores = twin_scores(task, **LIFE)
    monkeypatch.setattr(twin, "live_without_growth", lambda *args, **options: pytest.fail("made again"))
    assert twin_scores(task, **LIFE) == scores


def test_a_cache_that_cannot_be_written_only_costs_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = tiny_task(horizon=2)
    monkeypatch.setenv("ESPER_CACHE", str(tmp_path / "good"))
    scores = twin_scores(task, **LIFE)
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("ESPER_CACHE", str(tmp_path / "file"))
    assert twin_scores(task, **LIFE) == scores
    monkeypatch.setenv("ESPER_CACHE", str(tmp_path / "full"))
    monkeypatch.setattr(os, "replace", full_disk)
    assert twin_scores(task, **LIFE) == scores
    assert not list((tmp_path / "full" / "twins").iterdir())


# --- any number of slots --------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 5, 8])
def test_hosts_with_any_number_of_slots_are_trained(slots: int, tmp_path: Path) -> None:
    out = tmp_path / "run"
    teach(TINY.model_copy(update={"slots": slots, "rounds": 1}), out)
    assert load_policy(out / "best").num_slots == slots
    assert len(read_rows(out, RunRow)[0].slots) == slots


def test_a_policy_with_room_for_eight_slots_grows_a_host_with_three(tmp_path: Path) -> None:
    teach(TINY.model_copy(update={"capacity": 8, "rounds": 1}), tmp_path / "run")
    best = str(tmp_path / "run" / "best")
    words = ["run", "--task", "tiny", "--decider", "ppo", "--checkpoint", best, "--steps", "4"]
    cli.main([*words, "--out", str(tmp_path / "grown")])
    assert load_policy(best).num_slots == 8
    assert read_rows(tmp_path / "grown", RunRow)[0].slots == ["r0c0", "r0c1", "r0c2"]
    assert len(read_rows(tmp_path / "grown", EpisodeRow)) == 1


def test_a_policy_without_room_for_all_slots_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    teach(TINY.model_copy(update={"slots": 2, "rounds": 1}), tmp_path / "run")
    best = str(tmp_path / "run" / "best")
    said = sentence_of(capsys, "run", "--task", "tiny", "--decider", "ppo", "--checkpoint", best)
    assert "a policy with room for 2 slots cannot serve a host with 3" in said
