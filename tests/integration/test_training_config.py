"""Training configuration: every key has an effect, and all invalid settings are reported at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest

from esper.karn.run import read_rows
from esper.leyline import LifecycleRules
from esper.leyline.errors import UnknownNameError
from esper.leyline.rows import TABLES, RunRow, UpdateRow
from esper.run.checkpoint_file import CHECKPOINT, read_checkpoint
from esper.run.policy_training import train
from esper.run.run_config import PRESETS, ConfigError, TrainingConfig, checked, training_config
from esper.run.train_checkpoint import config_of_run
from esper.simic.rewards.families import FamilyName
from esper.tolaria.tasks import DATA_TASKS, TASKS
from tests.integration.training import TIMES, after_iterations
from tests.tolaria.building import tiny_task

AT_ONCE = LifecycleRules(min_training_epochs=0, min_prune_age=1, embargo_epochs=1)
BASE: Mapping[str, Any] = {
    "task": "tiny",
    "envs": 2,
    "iterations": 2,
    "steps": 3,
    "hidden_dim": 16,
    "update_epochs": 3,
    "evaluate_every": 2,
    "evaluate_episodes": 1,
    "checkpoint_every": 2,
}


@pytest.fixture(scope="module", autouse=True)
def tiny_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Register tasks with short episodes; all tests of this process share a cache of twin scores."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ESPER_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        patch.setitem(TASKS, "tiny", tiny_task(rules=AT_ONCE))
        patch.setitem(TASKS, "other", tiny_task((4, 4, 4), kernel=3, rules=AT_ONCE))
        yield


class Run(NamedTuple):
    """Outputs of a training: update rows (without time columns), checkpoints, telemetry tables and
    devices."""

    rows: list[dict[str, Any]]
    checkpoints: list[list[int]]
    """Iteration of the checkpoint after each iteration; empty if there is no checkpoint."""
    tables: list[str]
    """Names of telemetry tables that have rows."""
    where: list[str]
    """Devices of the environments and of the policy."""

    @property
    def columns(self) -> dict[str, list[Any]]:
        return {name: [row[name] for row in self.rows] for name in self.rows[0]}

    def differences(self, other: Run) -> set[str]:
        """Return the names of telemetry columns and run attributes that differ between two runs."""
        found = {name for name, values in self.columns.items() if values != other.columns[name]}
        return found | {
            name for name in ("checkpoints", "tables", "where") if getattr(self, name) != getattr(other, name)
        }


def run(directory: Path, settings: Mapping[str, Any]) -> Run:
    config = checked(TrainingConfig, settings)
    checkpoints = []

    def look(number: int) -> None:
        there = [directory] if (directory / CHECKPOINT).exists() else []
        checkpoints.append([read_checkpoint(run)["iteration"] for run in there])

    with after_iterations(look):
        train(config, directory)
    assert config_of_run(directory) == config
    rows = [
        {name: getattr(row, name) for name in row.__struct_fields__ if name not in TIMES}
        for row in read_rows(directory, UpdateRow)
    ]
    [begun] = read_rows(directory, RunRow)
    where = [*begun.devices, begun.config["policy_device"]]
    return Run(rows, checkpoints, [table for table in TABLES if read_rows(directory, TABLES[table])], where)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("base") / "run", BASE)


@pytest.fixture(scope="module")
def base_of_one_iteration(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("base") / "run", {**BASE, "iterations": 1})


# --- effect of every key ---------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")
SETTINGS: Mapping[str, tuple[Any, tuple[Any, ...]]] = {
    "task": ("other", (3, None)),
    "rng_seed": (1, (-1, 1000000, 0.5, "zero")),
    "envs": (3, (0, -4, 2.5, "many", None)),
    "iterations": (3, (0, None)),
    "steps": (2, (0, "few")),
    "budget": ("4M", (0,)),
    "slots": (2, (0, "r0c0")),
    "vary_slots": (True, ("perhaps", None)),
    "capacity": (4, (0, -1)),
    "auto_forward": (False, ("perhaps", 2)),
    "context": (True, ("perhaps", 2)),
    "hidden_dim": (24, (7, "wide")),
    "critic": ("op_value", ("op_valeu", None, 1)),
    "conditioned": (False, ("perhaps", 2)),
    "hold_heads": (("slot",), (("slto",), "slot", 3)),
    "reward_family": ("loss", ("pared", None)),
    "rent": (5.0, (-0.1, NAN, INF)),
    "reward_scale": (1.0, (0.0, -1.0, NAN, INF)),
    "update_epochs": (2, (0, 1.5)),
    "learning_rate": (0.005, (0.0, -0.001, NAN, INF)),
    "clip": (0.001, (0.0, 1.0, NAN)),
    "clip_per_head": (True, ("joint",)),
    "target_kl": (1e-09, (0.0, NAN, INF)),
    "gamma": (0.5, (0.0, 1.01, NAN)),
    "horizon_terminates": (False, ("never",)),
    "lam": (0.5, (-0.1, 1.1, NAN)),
    "entropy_start": (0.5, (-0.1, NAN, INF)),
    "entropy_end": (0.5, (-0.1, NAN, INF)),
    "entropy_floor": (1.0, (-0.1, 1.1, NAN)),
    "value_coefficient": (0.05, (-0.5, NAN, INF)),
    "value_clip": (0.0001, (0.0, -1.0, INF)),
    "max_grad_norm": (0.001, (0.0, NAN, INF)),
    "evaluate_every": (1, (0,)),
    "evaluate_episodes": (2, (0,)),
    "checkpoint_every": (1, (0,)),
    "detail": ("summary", ("everything",)),
    "devices": (("cpu:0", "cpu:1"), ("cpu", 3, None)),
    "policy_device": ("cpu:1", (3, None)),
    "amp": ("bfloat16", ("half", 16)),
}
"""Test values of every configuration key: one that changes a training with settings ``BASE``, and invalid
ones."""
ALTERNATIVES = {key: value for key, (value, _) in SETTINGS.items()}
MISTAKES = {key: bad for key, (_, bad) in SETTINGS.items()}
ALONE: Mapping[str, set[str]] = {
    "evaluate_every": {"evaluation_return", "evaluation_score"},
    "evaluate_episodes": {"evaluation_return", "evaluation_score"},
    "checkpoint_every": {"checkpoints"},
    "detail": {"tables"},
    "devices": {"where"},
    "policy_device": {"where"},
}
"""Configuration keys that do not change the training itself, each with the names of the outputs that it may
change."""
FIRST_ITERATION_SAME = ("iterations", "entropy_end")
"""Configuration keys whose value has no effect on the first training iteration."""
IN_TWO_ITERATIONS = ("auto_forward", "rent", "reward_scale")
"""Configuration keys that change the training, but not its first iteration with these settings."""
IN_ONE_ITERATION = set(SETTINGS) - set(ALONE) - set(FIRST_ITERATION_SAME) - set(IN_TWO_ITERATIONS)
"""Configuration keys whose value changes a training of one iteration."""


def test_every_key_of_the_training_configuration_has_a_test_value() -> None:
    assert {*SETTINGS, "data"} == set(TrainingConfig.model_fields)


def test_data_is_read_by_the_task_that_takes_data(
    base_of_one_iteration: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DATA_TASKS, "named", lambda data: TASKS[data.name])
    settings = {**BASE, "iterations": 1, "task": "named"}
    same = run(tmp_path / "run", {**settings, "data": "tiny"})
    assert same.differences(base_of_one_iteration) == set()
    assert run(tmp_path / "run2", {**settings, "data": "other"}).differences(base_of_one_iteration)


def test_training_with_the_same_settings_gives_the_same_update_rows(base: Run, tmp_path: Path) -> None:
    assert run(tmp_path / "run", BASE).differences(base) == set()


@pytest.mark.parametrize("key", sorted(set(SETTINGS) - IN_ONE_ITERATION))
def test_change_of_a_configuration_key_changes_the_training_or_its_outputs(
    key: str, base: Run, tmp_path: Path
) -> None:
    flipped = run(tmp_path / "run", {**BASE, key: ALTERNATIVES[key]})
    found = flipped.differences(base)
    assert found, f"{key} has no effect"
    if key in ALONE:
        assert found <= ALONE[key]
    if key in FIRST_ITERATION_SAME:
        assert flipped.rows[0] == base.rows[0]


@pytest.mark.parametrize("key", sorted(IN_ONE_ITERATION))
def test_change_of_a_configuration_key_changes_a_training_of_one_iteration(
    key: str, base_of_one_iteration: Run, tmp_path: Path
) -> None:
    settings = {**BASE, "iterations": 1, key: ALTERNATIVES[key]}
    if key == "budget":
        del settings["steps"]
    assert run(tmp_path / "run", settings).differences(base_of_one_iteration), f"{key} has no effect"


@pytest.mark.parametrize(
    ("family", "gamma"),
    [("paired", 1.0), ("sparse", 1.0), ("log_loss", 1.0), ("contribution", 0.995), ("loss", 0.995)],
)
def test_default_discount_depends_on_the_reward_family(family: FamilyName, gamma: float) -> None:
    assert TrainingConfig(reward_family=family).discount == gamma
    assert TrainingConfig(reward_family=family, gamma=0.9).discount == 0.9


# --- reward families -------------------------------------------------------------------------------

TERMS: Mapping[FamilyName, set[str]] = {
    "paired": {"lead", "rent", "rollback"},
    "contribution": {"contribution", "rent", "churn", "rollback"},
    "loss": {"loss", "rent", "rollback"},
    "log_loss": {"log_loss", "rent", "rollback"},
    "sparse": {"score", "rent", "rollback"},
}
MAY_BE_UNKNOWN = {"value_return_correlation", "early_stop_update_epoch", "skipped", "explosion"}


@pytest.mark.parametrize("family", get_args(FamilyName))
def test_a_policy_trains_under_every_reward_family(family: FamilyName, tmp_path: Path) -> None:
    found = run(tmp_path / "run", {**BASE, "reward_family": family, "steps": 4, "evaluate_every": 1})
    assert len(found.rows) == 2
    for row in found.rows:
        unknown = {name for name, value in row.items() if value is None} - MAY_BE_UNKNOWN
        assert unknown == ({"reward_variance_unpaired"} if family != "paired" else set())
        assert set(row["reward_terms"]) == TERMS[family]
        assert sum(row["reward_terms"].values()) == pytest.approx(row["mean_return"], abs=1e-5)
        assert row["reward_variance"] > 0.0
        assert row["first_ratio_error"] < 1e-5
        assert row["broken_episodes"] == 0


# --- invalid settings ------------------------------------------------------------------------------

MISSPELT = {"learnig_rate": "learning_rate", "reward-scale": "reward_scale", "clip_perhead": "clip_per_head"}


def said_about(settings: Mapping[str, Any]) -> str:
    with pytest.raises(ConfigError) as refusal:
        checked(TrainingConfig, settings)
    return str(refusal.value)


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, bad in MISTAKES.items() for value in bad])
def test_invalid_value_of_the_training_configuration_is_reported_with_its_key(key: str, value: Any) -> None:
    said = said_about({key: value})
    assert said.startswith((f"{key}: ", f"{key}.0: "))
    found = value[0] if key == "hold_heads" and isinstance(value, tuple) else value
    assert f"; found {found!r}" in said


def test_all_invalid_keys_and_values_of_a_training_configuration_are_reported_at_once() -> None:
    said = said_about({**{key: values[0] for key, values in MISTAKES.items()}, **dict.fromkeys(MISSPELT, 1)})
    sentences = said.split("; ")
    for key in MISTAKES:
        assert any(sentence.startswith((f"{key}: ", f"{key}.0: ")) for sentence in sentences), key
    for wrong, right in MISSPELT.items():
        assert f"unknown key '{wrong}'; did you mean {right}?" in said


def test_unknown_configuration_key_without_a_similar_key_is_refused_with_all_known_keys() -> None:
    said = said_about({"qqqq": 1})
    assert said == f"unknown key 'qqqq'; known: {', '.join(TrainingConfig.model_fields)}"


def test_unknown_task_or_option_name_is_refused_with_the_allowed_and_the_nearest_names() -> None:
    said = said_about({"reward_family": "pared", "critic": "q", "task": "digit", "envs": 0})
    assert "found 'pared' (did you mean paired?)" in said
    assert "'paired', 'contribution', 'loss', 'log_loss' or 'sparse'" in said
    assert "'state_value' or 'op_value'" in said
    assert "unknown task 'digit'; did you mean digits" in said
    assert "envs: " in said


def test_training_configuration_with_both_budget_and_steps_is_refused() -> None:
    assert said_about({"budget": "2T", "steps": 20}) == (
        "budget and steps both set the length of an episode; leave one of them out"
    )


# --- presets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_configuration_file_overrides_the_preset_and_flags_override_the_file(preset: str) -> None:
    assert training_config(preset, {}, {}).model_dump(mode="json").items() >= PRESETS[preset].items()
    config = training_config(preset, {"envs": 12, "iterations": 4}, {"iterations": 5})
    assert (config.envs, config.iterations) == (12, 5)


def test_unknown_preset_or_preset_of_another_task_is_refused() -> None:
    refusal = "preset 'quick' is of task digits_impaired and cannot train digits"
    with pytest.raises(ConfigError, match=refusal):
        training_config("quick", {}, {"task": "digits"})
    with pytest.raises(UnknownNameError, match="quick"):
        training_config("quik", {}, {})
