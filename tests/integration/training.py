"""Helpers of tests with short trainings: set-up, comparison of runs, and refused commands."""

import errno
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from esper.karn.run import open_run
from esper.leyline import LifecycleRules
from esper.leyline.rows import TABLES, AlertRow, Row, UpdateRow
from esper.nissa.alert_monitor import AlertMonitor
from esper.nissa.alert_rules import MACHINE_RULES
from esper.nissa.writer import RunWriter
from esper.run.checkpoint_file import read_checkpoint
from esper.scripts import cli
from esper.scripts.guard import USAGE_ERROR, exit_on_error
from esper.simic.config import TrainingConfig
from esper.simic.training.trainer import PolicyEvaluation, Trainer
from esper.tamiyo.policy.checkpoint import load_policy
from esper.tolaria.tasks import TASKS
from tests.tolaria.building import bits, tiny_task

STEPS = 2
"""Number of steps in an episode of the task "tiny"."""
TIMES = {"t", "seconds", "ms", "phase_ms", "started", "git_revision"}
"""Telemetry columns that differ between two repetitions of the same run."""


def prepare(cache: Path, patch: pytest.MonkeyPatch | None = None) -> None:
    """Register the task "tiny"; add the iteration number to each evaluation return except the last.

    An artificial alert is raised in iteration 2, so that the telemetry switches to a higher level of detail.
    """
    patch = patch or pytest.MonkeyPatch()
    at_once = LifecycleRules(min_training_epochs=0, min_prune_age=1, embargo_epochs=1)
    patch.setitem(TASKS, "tiny", tiny_task(rules=at_once, horizon=STEPS))
    patch.setenv("ESPER_CACHE", str(cache))
    evaluate = Trainer.evaluate

    def eventful(trainer: Trainer) -> PolicyEvaluation:
        found = evaluate(trainer)
        if trainer.task.name != "tiny" or trainer.is_over:
            return found
        return found._replace(mean_return=found.mean_return + trainer.iteration)

    patch.setattr(Trainer, "evaluate", eventful)
    take = AlertMonitor.take

    def worried(watch: AlertMonitor, row: Row) -> list[AlertRow]:
        found = take(watch, row)
        if isinstance(row, UpdateRow) and row.iteration == 2 and watch._past.run.task == "tiny":
            alert = {"rule": "test", "event": "raised", "severity": "warning", "scope": "run", "hint": ""}
            found.append(AlertRow(**alert, value=None, limit=None, iteration=2))
        return found

    patch.setattr(AlertMonitor, "take", worried)


def tiny(**changes: Any) -> TrainingConfig:
    """Return the configuration of a short training on the task "tiny", which ``prepare`` registers."""
    settings = {
        "task": "tiny",
        "reward_family": "loss",
        "envs": 2,
        "iterations": 3,
        "hidden_dim": 16,
        "update_epochs": 2,
        "evaluate_every": 1,
        "evaluate_episodes": 1,
        "checkpoint_every": 1,
        "detail": "summary",
    }
    return TrainingConfig(**{**settings, **changes})


class StoppedError(Exception):
    """Exception raised by tests to end a run early."""


@contextmanager
def after_iterations(act: Callable[[int], None]) -> Iterator[None]:
    """Call ``act`` with the iteration number after the telemetry rows of each iteration were written."""
    iteration = RunWriter.iteration

    @contextmanager
    def hooked(writer: RunWriter, number: int, **settings: bool) -> Iterator[None]:
        with iteration(writer, number, **settings):
            yield
        if number > 0:
            act(number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunWriter, "iteration", hooked)
        yield


def full_disk(*args: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def forked(target: Callable[..., object], *args: object) -> BaseProcess:
    """Start a child process from a fork server in which torch and the training modules are already imported.

    The fork server, which imports torch, is started once per pytest process.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["esper.scripts.train_command", "torch._dynamo"])
    child = context.Process(target=target, args=args)
    child.start()
    return child


def gone(process: int, seconds: float = 60.0) -> bool:
    """Wait until a process has ended, for at most ``seconds``; return whether it has ended."""
    limit = time.monotonic() + seconds
    while is_alive(process) and time.monotonic() < limit:
        time.sleep(0.02)
    return not is_alive(process)


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


# --- comparison of runs ---------------------------------------------------------------------------


def assert_same_end(one: Path, other: Path) -> None:
    """Assert that two trainings have the same telemetry rows, checkpoints and best policy, bit for bit."""
    assert rows_without_times(one) == rows_without_times(other)
    assert checkpoint_in(one) == checkpoint_in(other)
    assert files_below(one / "best") == files_below(other / "best")
    load_policy(other / "best")


def rows_without_times(run: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of all telemetry tables but ``resource``, without time columns and resource alerts."""
    opened = open_run(run)
    return {
        table: [
            {name: value for name, value in msgspec.to_builtins(row).items() if name not in TIMES}
            for row in opened.rows(kind)
            if getattr(row, "rule", None) not in MACHINE_RULES
        ]
        for table, kind in TABLES.items()
        if table != "resource"
    }


def checkpoint_in(run: Path) -> object:
    """Return the checkpoint of a run, bit for bit, without the entry ``rows``, which contains run times."""
    state = read_checkpoint(run)
    return bits([state[name] for name in sorted(state) if name != "rows"])


def files_below(folder: Path) -> dict[str, bytes]:
    """Return file contents by path below ``folder``."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def everything_in(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- refusals -------------------------------------------------------------------------------------

Refused = Callable[..., str]
"""Type of the fixture ``refused``: a function that runs a command and returns its error message."""


def sentence_of(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """Run a command that must be refused and return its one-sentence error message."""
    return sentence_from(capsys, lambda: cli.main([str(word) for word in words]))


def sentence_from(capsys: pytest.CaptureFixture[str], command: Callable[[], None]) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        exit_on_error(command)
    assert stop.value.code == USAGE_ERROR
    said = capsys.readouterr().err
    assert said.startswith("esper: ")
    assert said.count("\n") == 1
    return said
