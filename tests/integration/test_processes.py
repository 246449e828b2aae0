"""Training in several processes: bit-equal to training in one process, and errors if a process is lost."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import FileStore

from esper.karn.run import read_rows
from esper.leyline.errors import EsperError
from esper.leyline.rows import EpochRow, Row
from esper.nissa.iteration_journal import IterationJournal
from esper.run.policy_training import train
from esper.scripts import cli
from esper.simic.agent.ppo import PPOAgent
from esper.simic.training import exchange
from tests.integration.training import assert_same_end, forked, free_port, prepare, rows_without_times, tiny

ROOT = Path(__file__).parents[2]
WORDS = shlex.split(
    "train --task tiny --reward-family loss --hidden-dim 16 --envs 6 --iterations 3 --update-epochs 2"
    " --evaluate-episodes 5 --evaluate-every 2 --checkpoint-every 1"
)
"""Training command whose environments and evaluation episodes are split into three shards each."""
SECONDS = 600.0
"""Timeout of multi-process tests in seconds."""
MISHAPS = "ESPER_TEST_MISHAPS"
"""Environment variable with a folder; a file RANK-ITERATION there kills that rank in that iteration."""

IN_EVERY_WORKER = """
import os
if "RANK" in os.environ:
    from tests.integration.test_processes import prepare_worker
    prepare_worker()
"""


def prepare_worker() -> None:
    """Set up a process that torchrun started: register the task, and install the planned kill."""
    prepare(Path(os.environ["ESPER_CACHE"]))
    if MISHAPS in os.environ:
        be_killed(Path(os.environ[MISHAPS]))


def be_killed(mishaps: Path) -> None:
    take = IterationJournal.take

    def fatal(journal: IterationJournal, iteration: int, env: int, rows: Sequence[Row]) -> None:
        take(journal, iteration, env, rows)
        own = mishaps / f"{os.environ['RANK']}-{iteration}"
        if own.exists():
            own.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        # This rank waits for the kill, so that the rank that will be killed gets a shard of environments.
        limit = time.monotonic() + SECONDS
        while any(mishaps.glob(f"*-{iteration}")) and time.monotonic() < limit:
            time.sleep(0.02)

    IterationJournal.take = fatal  # type: ignore[method-assign]


@pytest.fixture
def mishaps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "mishaps"
    folder.mkdir()
    monkeypatch.setenv(MISHAPS, str(folder))
    return folder


@pytest.fixture(scope="module", autouse=True)
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Register the task "tiny" here and in child processes, with a common cache of twin scores."""
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "sitecustomize.py").write_text(IN_EVERY_WORKER)
    path = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        prepare(folder / "cache", patch)
        yield


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run directory of a training in one process."""
    out = tmp_path_factory.mktemp("alone") / "run"
    cli.main([*WORDS, "--out", str(out)])
    return out


def test_training_in_two_processes_is_bit_equal_to_training_in_one_process(
    alone: Path, tmp_path: Path
) -> None:
    cli.main([*WORDS, "--processes", "2", "--out", str(tmp_path / "run")])
    assert_same_end(alone, tmp_path / "run")


def test_training_that_loses_a_process_ends_with_a_one_sentence_error_and_can_be_resumed(
    alone: Path,
    tmp_path: Path,
    mishaps: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    out = tmp_path / "lost" / "run"
    began = time.monotonic()
    (mishaps / "1-3").touch()
    with pytest.raises(SystemExit) as stop:
        cli.main([*WORDS, "--processes", "2", "--out", str(out)])
    assert stop.value.code == 2
    resumed = f"esper train --resume {out}"
    assert capfd.readouterr().err == f"esper: process 1 of 2 was ended by SIGKILL; go on with {resumed}\n"
    assert not caplog.records, "torchrun's own account"
    assert 1 <= len(rows_without_times(out)["update"]) <= 2
    rows = read_rows(out, EpochRow)
    assert all(0 < row.t < time.monotonic() - began for row in rows), "all processes count the run's own time"
    seen = [(row.episode, row.env, row.epoch) for row in rows]
    assert len(set(seen)) == len(seen)
    assert set(product((0, 1), range(6), (1, 2))) <= set(seen)
    cli.main([*shlex.split(resumed)[1:], "--processes", "1"])
    assert_same_end(alone, out)


# --- two machines: two torchruns over the loopback ----------------------------------------------------


def start_machine(log: Path, port: int, *words: str, wait: int = 600) -> subprocess.Popen[bytes]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    torchrun += ["--rdzv-backend=esper", f"--rdzv-endpoint=127.0.0.1:{port}", "--max-restarts=2"]
    torchrun += [f"--rdzv-conf=join_timeout={wait}"]
    with log.open("wb") as said:
        return subprocess.Popen(
            [*torchrun, "-m", "esper.scripts.train", "ppo", *words], stdout=said, stderr=subprocess.STDOUT
        )


def test_torchrun_ends_with_a_one_sentence_error_if_the_second_machine_never_joins(tmp_path: Path) -> None:
    log, out = tmp_path / "said.log", tmp_path / "run"

    code = start_machine(log, free_port(), *WORDS[1:], "--out", str(out), wait=2).wait(SECONDS)

    assert (code, out.exists()) == (1, False)
    assert "did not fill: 2 machines were wanted" in log.read_text()
    assert "Traceback" not in log.read_text()


def test_training_is_bit_equal_to_an_uninterrupted_one_if_torchrun_restarts_killed_ranks(
    alone: Path, tmp_path: Path, mishaps: Path
) -> None:
    """Kill rank 1 before the first checkpoint, and later rank 0, which writes the telemetry."""
    out, port = tmp_path / "run", free_port()
    (mishaps / "1-1").touch()
    (mishaps / "0-3").touch()
    logs = [tmp_path / "one.log", tmp_path / "other.log"]
    machines = [start_machine(log, port, *WORDS[1:], "--out", str(out)) for log in logs]
    codes = [machine.wait(SECONDS) for machine in machines]
    said = "".join(log.read_text() for log in logs)
    assert codes == [0, 0], said
    assert not list(mishaps.iterdir()), "both were killed"
    assert_same_end(alone, out)
    assert said.count("failed (exitcode: -9)") == 2
    assert f"with --resume {out} in place of other flags" in said, "each survivor prints how to resume"
    assert said.count(f"best policy in {out / 'best'}") == 1


# --- differences between ranks -----------------------------------------------------------------------


def take_part(rank: int, folder: Path, out: Path, drifts: bool) -> None:
    """Train as one of two ranks and write the error message of the training to a file."""
    prepare(folder / "cache")
    if drifts:
        update = PPOAgent.update

        def drifting(agent: PPOAgent, *args: Any) -> object:
            metrics = update(agent, *args)
            next(agent.policy.parameters()).data[0] += 1e-6
            return metrics

        PPOAgent.update = drifting  # type: ignore[assignment,method-assign]
    exchange.join(FileStore(str(folder / "store"), 2), rank, 2, {}, SECONDS)
    try:
        train(tiny(envs=4), out)
    except EsperError as error:
        (folder / f"said-{rank}").write_text(str(error))
    os._exit(0)


@pytest.fixture
def said_by_two(tmp_path: Path) -> Callable[[Path, Path, bool], list[str]]:
    """Return a function that trains as two ranks and returns the error messages of the two."""

    def said(one: Path, other: Path, drifts: bool) -> list[str]:
        parts = [forked(take_part, 0, tmp_path, one, False), forked(take_part, 1, tmp_path, other, drifts)]
        for part in parts:
            part.join(SECONDS)
        return [(tmp_path / f"said-{rank}").read_text() for rank in (0, 1)]

    return said


def test_training_is_refused_if_two_ranks_have_different_run_directories(
    said_by_two: Callable[[Path, Path, bool], list[str]], tmp_path: Path
) -> None:
    own, other = tmp_path / "run", tmp_path / "elsewhere"
    for directory, sentence in zip((own, other), said_by_two(own, other, False), strict=True):
        expected = f"rank 1 does not see the run directory '{directory}' as rank 0 does; name one that all"
        assert sentence == f"{expected} machines share"


def test_training_ends_with_an_error_if_the_policies_of_two_ranks_differ(
    said_by_two: Callable[[Path, Path, bool], list[str]], tmp_path: Path
) -> None:
    sentences = said_by_two(tmp_path / "run", tmp_path / "run", True)
    assert sentences[0] == sentences[1]
    assert sentences[0].startswith("after iteration 1 the policy of rank 1 is not that of rank 0, since")
