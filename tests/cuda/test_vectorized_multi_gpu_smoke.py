"""Short PPO training on two devices: two GPUs if there are two, otherwise the CPU under two device names."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from esper.karn.run import read_rows
from esper.leyline.rows import DecisionRow, EpisodeRow, EpochRow, RunRow, SeedRow, UpdateRow
from esper.scripts import cli
from esper.tamiyo.policy.checkpoint import load_policy
from tests.integration.training import TIMES, prepare

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
ENVS = 4


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    prepare(tmp_path / "cache", monkeypatch)
    return tmp_path


def train(directory: Path, devices: Sequence[str], *rest: str) -> Path:
    words = ["train", "--task", "tiny", "--envs", str(ENVS), "--iterations", "2", "--hidden-dim", "16"]
    words += ["--evaluate-every", "2", "--evaluate-episodes", "2", "--detail", "full"]
    cli.main([*words, "--devices", *devices, *rest, "--out", str(directory)])
    return directory


def rows_of(directory: Path) -> list[dict[str, Any]]:
    kinds = (EpochRow, SeedRow, DecisionRow, EpisodeRow, UpdateRow)
    rows = [msgspec.structs.asdict(row) for kind in kinds for row in read_rows(directory, kind)]
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


def check_map(directory: Path, devices: Sequence[str], said: str) -> None:
    """Check that the device of every environment is printed and stored in the run row."""
    [run] = read_rows(directory, RunRow)
    assert run.devices == [devices[env % len(devices)] for env in range(ENVS)]
    assert said == f"esper: {devices[0]} runs environments 0, 2; {devices[1]} runs environments 1, 3\n"


@pytest.mark.skipif(GPUS < 2, reason=f"two GPUs are needed; there are {GPUS}")
@pytest.mark.parametrize("amp", ["off", "bfloat16", "float16"])
def test_ppo_training_runs_on_two_gpus_in_every_precision(
    amp: str, world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    devices = ("cuda:0", "cuda:1")
    run = train(world / "run", devices, "--policy-device", "cuda:0", "--amp", amp)
    check_map(run, devices, capsys.readouterr().err)
    updates = read_rows(run, UpdateRow)
    assert [row.iteration for row in updates] == [1, 2]
    assert all(row.skipped is None and row.mean_return is not None for row in updates)
    assert len(read_rows(run, EpisodeRow)) >= 2 * ENVS
    assert load_policy(run / "best")


def test_training_on_the_cpu_under_two_device_names_is_bit_equal_to_training_on_one_device(
    world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = train(world / "both", ("cpu:0", "cpu:1"), "--policy-device", "cpu:1")
    check_map(both, ("cpu:0", "cpu:1"), capsys.readouterr().err)
    one = train(world / "one", ("cpu",))
    assert capsys.readouterr().err == "", "everything where it always was"
    assert rows_of(both) == rows_of(one)
    weights = [load_policy(run / "best").state_dict() for run in (both, one)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])
