"""Trainings killed by SIGKILL at chosen points of the code and resumed end with the same files."""

import itertools
import os
import shutil
import signal
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest

from esper.karn.run import Run, open_run
from esper.leyline.rows import DecisionRow, EnvRow, EpisodeRow, EpochRow, TransitionRow, UpdateRow
from esper.nissa import compaction, iteration_journal
from esper.nissa import writer as writer_module
from esper.nissa.writer import RunWriter
from esper.run.checkpoint_file import CHECKPOINT
from esper.scripts import cli
from esper.simic.agent.ppo import PPOAgent
from esper.simic.training import trainer
from esper.simic.training.policy_env import GrowthEnv
from esper.tamiyo.policy.checkpoint import load_policy
from tests.integration.training import STEPS, TIMES, assert_same_end, forked, prepare

WORDS = ["train", "--task", "tiny", "--reward-family", "loss", "--hidden-dim", "16", "--rng-seed", "4"]
WORDS += ["--envs", "2", "--iterations", "5", "--update-epochs", "3", "--evaluate-episodes", "1"]
WORDS += ["--evaluate-every", "2", "--checkpoint-every", "2"]
"""Training command with checkpoints and evaluations after iterations 2, 4 and 5; iteration 4 gives the best
policy."""
STEPS_OF_TWO_ITERATIONS = 3 * STEPS
"""Number of calls of ``GrowthEnv.step`` in two training iterations and the evaluation after them."""


@pytest.fixture(scope="module")
def undisturbed(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    cli.main([*WORDS, "--out", str(out)])
    return out


# --- moments of the kill --------------------------------------------------------------------------


def kill(*_: object) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL cannot be survived")


def on_call(
    owner: Any,
    name: str,
    number: int = 1,
    act: Callable[..., object] = kill,
    *,
    after: bool = False,
    counts: Callable[..., bool] = lambda *args: True,
) -> None:
    """Wrap the function ``name`` so that ``act`` runs before or after its call ``number``; only calls for
    which ``counts`` returns True are numbered, from 1."""
    original = getattr(owner, name)
    calls = itertools.count(1)

    def hooked(*args: Any, **options: Any) -> Any:
        due = counts(*args) and next(calls) == number
        if due and not after:
            act(*args)
        result = original(*args, **options)
        if due and after:
            act(*args)
        return result

    setattr(owner, name, hooked)


def at_file(file: str, **how: Any) -> None:
    """Call ``act`` before, or after, a written file is renamed to its final name."""
    on_call(os, "replace", counts=lambda partial, path: str(path).endswith(file), **how)


def cut_in_half_and_die(partial: Path, path: Path) -> None:
    """Truncate a partly written file to half of its size and kill this process."""
    os.truncate(partial, partial.stat().st_size // 2)
    kill()


def tear_lines_and_die(file: int, content: bytearray) -> None:
    """Write half of the bytes of the telemetry lines and kill this process."""
    os.write(file, content[: len(content) // 2])
    kill()


HALF_AN_EPOCH = "half way through the rows of an epoch"
MOMENTS: dict[str, Callable[[], None]] = {
    "before the run's own row": lambda: on_call(RunWriter, "emit", 1),
    "in the first rollout": lambda: on_call(GrowthEnv, "step", 2),
    "half way through the first checkpoint": lambda: at_file(CHECKPOINT, act=cut_in_half_and_die),
    "before the first checkpoint gets its name": lambda: at_file(CHECKPOINT),
    "in a rollout after a checkpoint": lambda: on_call(GrowthEnv, "step", STEPS_OF_TWO_ITERATIONS + 2),
    "in an update after a checkpoint, between two update epochs": lambda: on_call(
        PPOAgent, "_update_epoch", 3, counts=lambda agent, batch, number, metrics: number == 1
    ),
    "during an evaluation": lambda: on_call(
        trainer, "evaluate", 2, lambda *args: on_call(GrowthEnv, "step", 2)
    ),
    "after rows were written, before their checkpoint": lambda: on_call(
        RunWriter, "_commit", 5, after=True, counts=lambda writer: writer._due is not None
    ),
    "half way through the rows of an iteration": lambda: at_file("rows-00003.jsonl", act=cut_in_half_and_die),
    "after the rows of an iteration got their name": lambda: at_file("rows-00003.jsonl", after=True),
    HALF_AN_EPOCH: lambda: on_call(iteration_journal, "write_all", 2 * STEPS + 2, tear_lines_and_die),
    "while lines that became Parquet are removed": lambda: on_call(compaction, "remove", 2),
    "before the better policy": lambda: at_file("best/policy.safetensors", number=2),
    "after the better policy": lambda: at_file("best/policy.safetensors", number=2, after=True),
    "half way through the second checkpoint": lambda: at_file(CHECKPOINT, number=2, act=cut_in_half_and_die),
    "before the second checkpoint replaces the first": lambda: at_file(CHECKPOINT, number=2),
    "after the second checkpoint replaced the first": lambda: at_file(CHECKPOINT, number=2, after=True),
}

FINISHED: dict[str, tuple[int, int]] = {
    "before the run's own row": (0, 0),
    "in the first rollout": (0, 1),
    "half way through the first checkpoint": (2, 0),
    "in a rollout after a checkpoint": (2, 1),
    "in an update after a checkpoint, between two update epochs": (2, STEPS),
    "during an evaluation": (3, STEPS),
    "after rows were written, before their checkpoint": (4, 0),
    "half way through the rows of an iteration": (2, STEPS),
    "after the rows of an iteration got their name": (3, 0),
    HALF_AN_EPOCH: (2, 1),
    "while lines that became Parquet are removed": (2, 0),
}
"""Number of finished iterations, and number of finished epochs in the next iteration, for each point at which
the training is killed."""

MOMENTS_OF_RESUMING: dict[str, Callable[[], None]] = {
    "while rows without a checkpoint are removed": lambda: on_call(writer_module, "remove", 2, after=True),
    "before the first checkpoint since": lambda: at_file(CHECKPOINT),
}


def run_to_be_killed(cache: Path, moment: str, words: list[str]) -> None:
    """Run the command in this child process, which kills itself at the point named ``moment``."""
    prepare(cache)
    writer_module.LINES_BYTES = 2_000  # type: ignore[misc]  # every checkpoint converts
    (MOMENTS | MOMENTS_OF_RESUMING)[moment]()
    cli.main(words)


def die(cache: Path, moment: str, words: list[str]) -> None:
    """Start a process that runs the command and kills itself at the point ``moment``; wait for its end."""
    child = forked(run_to_be_killed, cache, moment, words)
    child.join(timeout=600)
    assert child.exitcode == -signal.SIGKILL, f"the moment never came: exit code {child.exitcode}"


@pytest.mark.parametrize("moment", MOMENTS)
def test_training_killed_at_any_point_and_resumed_ends_with_the_files_of_an_uninterrupted_training(
    moment: str, undisturbed: Path, cache: Path, tmp_path: Path
) -> None:
    """Before the resume, every telemetry row of a finished epoch must be read exactly once."""
    out = tmp_path / "run"
    die(cache, moment, [*WORDS, "--out", str(out)])
    if moment in FINISHED:
        check_rows(out, undisturbed, *FINISHED[moment], exact=moment != HALF_AN_EPOCH)
    if (out / "best" / "policy.safetensors").exists():
        # The saved best policy can be loaded, though it may be that of an earlier iteration.
        load_policy(out / "best")
    cli.main(["train", "--resume", str(out)])
    assert_same_end(undisturbed, out)


def check_rows(out: Path, undisturbed: Path, iterations: int, epochs: int, *, exact: bool) -> None:
    left, run = open_run(out), open_run(undisturbed)
    for kind in (DecisionRow, TransitionRow, EpochRow, EpisodeRow):
        found, whole = rows_of_episodes(left, kind), rows_of_episodes(run, kind)
        for (env, episode), rows in whole.items():
            finished = STEPS if episode < iterations else epochs if episode == iterations else 0
            there = found[env, episode]
            assert there == rows[: len(there)], "each once, in order"
            assert len(there) >= sum(is_over(row, finished, kind) for row in rows), "all of them"
            if exact:
                assert len(there) <= sum(row["epoch"] <= finished for row in rows)
    assert len(left.rows(UpdateRow)) == iterations


def is_over(row: dict[str, Any], finished: int, kind: type[EnvRow]) -> bool:
    """Return whether a telemetry row must already be written when ``finished`` epochs of its episode are
    finished.

    Decision rows and the transition rows they cause have the number of the preceding epoch.
    """
    return bool(
        row["epoch"] < finished or finished == STEPS or (row["epoch"] == finished and kind is EpochRow)
    )


def rows_of_episodes(run: Run, kind: type[EnvRow]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """Return the telemetry rows of each episode without time columns, in the order in which they are read."""
    episodes: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for row in run.rows(kind):
        columns = msgspec.to_builtins(row)
        episodes[row.env, row.episode].append({k: v for k, v in columns.items() if k not in TIMES})
    return episodes


@pytest.fixture(scope="module")
def killed_before(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("killed") / "run"
    die(cache, "after rows were written, before their checkpoint", [*WORDS, "--out", str(out)])
    return out


@pytest.mark.parametrize("moment", MOMENTS_OF_RESUMING)
def test_training_killed_during_a_resume_and_resumed_again_has_the_files_of_an_uninterrupted_training(
    moment: str, undisturbed: Path, killed_before: Path, cache: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    shutil.copytree(killed_before, out)
    die(cache, moment, ["train", "--resume", str(out)])
    cli.main(["train", "--resume", str(out)])
    assert_same_end(undisturbed, out)
