"""Number of slots of hosts, capacity of policies, and the training settings stored with a policy."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from esper.karn.run import read_rows
from esper.leyline import STAGE_NAMES
from esper.leyline.rows import EpisodeRow, RunRow, TransitionRow
from esper.run.policy_training import train
from esper.scripts import cli, eval_command
from esper.scripts.eval_command import Reports, run_arms
from esper.tamiyo.policy.checkpoint import TrainedOn, load_policy, read_training, save_policy
from tests.integration.training import sentence_of, tiny

pytestmark = pytest.mark.usefixtures("cache")


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 5, 8])
def test_a_policy_trains_on_hosts_with_any_number_of_slots(slots: int, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(tiny(slots=slots, iterations=1), out)
    assert load_policy(out / "best").num_slots == slots
    assert len(read_rows(out, RunRow)[0].slots) == slots
    assert read_training(out / "best") == TrainedOn("tiny", slots, 2, 0.01, auto_forward=True)


@pytest.mark.parametrize("slots", [1, 5])
def test_run_with_a_number_as_slots_builds_a_host_with_that_many_slots(slots: int, tmp_path: Path) -> None:
    words = ["run", "--task", "tiny", "--controller", "random", "--slots", str(slots)]
    cli.main([*words, "--out", str(tmp_path / "run")])
    (row,) = read_rows(tmp_path / "run", RunRow)
    assert row.slots == [f"r0c{column}" for column in range(slots)]


def test_a_policy_with_capacity_eight_grows_a_host_with_three_slots(tmp_path: Path) -> None:
    train(tiny(capacity=8, iterations=1), tmp_path / "run")
    best = str(tmp_path / "run" / "best")
    words = ["run", "--task", "tiny", "--controller", "ppo", "--checkpoint", best, "--steps", "4"]
    cli.main([*words, "--out", str(tmp_path / "grown")])
    assert load_policy(best).num_slots == 8
    assert read_rows(tmp_path / "grown", RunRow)[0].slots == ["r0c0", "r0c1", "r0c2"]
    assert len(read_rows(tmp_path / "grown", EpisodeRow)) == 1


def test_a_policy_with_less_capacity_than_the_host_has_slots_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny(slots=2, iterations=1), tmp_path / "run")
    best = str(tmp_path / "run" / "best")
    refused = "a policy with room for 2 slots cannot serve a host with 3"
    assert refused in sentence_of(
        capsys, "run", "--task", "tiny", "--controller", "ppo", "--checkpoint", best
    )
    assert refused in sentence_of(capsys, "eval", best, "--slots", "3")


# --- evaluation on the settings of the training -----------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, object]]:
    """Return a list that receives the settings of all arms that ``esper eval`` runs."""
    found: list[Mapping[str, object]] = []

    def run(
        arms: Mapping[str, Mapping[str, object]], rng_seeds: Sequence[int], **more: object
    ) -> dict[str, Reports]:
        found.extend(arms.values())
        # A single process is used, because the task "tiny" is not registered in child processes.
        return run_arms(arms, rng_seeds[:2], processes=1)

    monkeypatch.setattr(eval_command, "run_arms", run)
    return found


def test_eval_command_printed_by_a_training_uses_the_settings_of_the_training(
    tmp_path: Path, asked: list[Mapping[str, object]], capsys: pytest.CaptureFixture[str]
) -> None:
    settings = "--task tiny --slots 5 --steps 3 --rent 0.5 --no-auto-forward"
    words = [*settings.split(), "--envs", "2", "--iterations", "1", "--hidden-dim", "16"]
    cli.main(["train", *words, "--evaluate-episodes", "1", "--out", str(tmp_path / "a run")])
    printed = capsys.readouterr().out.splitlines()[-1].partition("compare it with: ")[2]
    assert printed == f"esper eval '{tmp_path}/a run/best'"
    cli.main(shlex.split(printed)[1:])
    assert capsys.readouterr().err == ""
    for arm in asked:
        assert (arm["task"], arm["slots"], arm["steps"], arm["auto_forward"]) == ("tiny", ("5",), 3, False)
    assert len(asked) == 4


def test_eval_command_prints_settings_that_differ_from_those_of_the_training(
    tmp_path: Path, asked: list[Mapping[str, object]], capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny(capacity=3, slots=2, iterations=1), tmp_path / "run")
    best = tmp_path / "run" / "best"
    cli.main(["eval", str(best), "--slots", "3", "--steps", "1"])
    said = capsys.readouterr().err
    assert said == "esper: evaluated on slots 3 (trained on 2), steps 1 (trained on 2)\n"
    assert asked[0]["slots"] == ("3",)
    save_policy(load_policy(best), best)
    cli.main(["eval", str(best), "--task", "tiny", "--steps", "1"])
    said = capsys.readouterr().err
    assert said.endswith("trained on; evaluated on task tiny, slots 3, steps 1, rent 0.01\n")


# --- stages by ADVANCE ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "cause"), [("--no-auto-forward", "policy"), ("--auto-forward", "mechanical")]
)
def test_cause_of_stage_changes_is_mechanical_if_auto_forward_is_on_and_policy_if_it_is_off(
    flag: str, cause: str, tmp_path: Path
) -> None:
    words = ["run", "--task", "tiny", "--steps", "9", flag]
    cli.main([*words, "--out", str(tmp_path / "run")])
    causes = {STAGE_NAMES[row.to_stage]: row.cause for row in read_rows(tmp_path / "run", TransitionRow)}
    assert [causes[name] for name in ("TRAINING", "BLENDING", "HOLDING")] == [cause] * 3
