"""Training of a policy with a FLOP budget, and evaluation of this policy with the same budget."""

from pathlib import Path

import pytest

from esper.karn.run import read_rows
from esper.leyline.rows import EpisodeRow
from esper.run.policy_training import train, trained_on
from esper.run.run_config import TrainingConfig
from esper.scripts.eval_command import eval_command
from esper.tamiyo.policy.checkpoint import load_policy, read_training
from esper.tolaria.tasks import TASKS
from tests.tolaria.building import tiny_task


@pytest.fixture
def _tiny_world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ESPER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(TASKS, "tiny", tiny_task())


@pytest.mark.usefixtures("_tiny_world")
def test_a_policy_is_evaluated_at_the_flop_budget_of_its_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = TrainingConfig(
        task="tiny", budget="4M", context=True, envs=1, iterations=1, hidden_dim=8, evaluate_episodes=1
    )  # type: ignore[arg-type]  # text, like on the command line
    train(config, tmp_path / "run")
    [episode] = read_rows(tmp_path / "run", EpisodeRow)
    charged = sum(episode.flops[name] for name in ("forward", "backward", "incubation", "counterfactual"))
    assert 3_000_000 < charged <= 4_000_000
    best = tmp_path / "run" / "best"
    recorded = read_training(best)
    assert recorded == trained_on(config)
    assert recorded is not None
    assert recorded.budget == 4_000_000
    assert load_policy(best).shape.context
    eval_command([str(best), "--episodes", "2", "--processes", "1"])
    said = capsys.readouterr()
    assert "ppo" in said.out
    assert "trained on" not in said.err, "nothing differs from the training"
    eval_command([str(best), "--episodes", "2", "--processes", "1", "--steps", "1"])
    assert f"steps 1 (trained on {recorded.steps})" in capsys.readouterr().err
