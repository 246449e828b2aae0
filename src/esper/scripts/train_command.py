"""``esper train``: teach a policy, alone or in several processes, from the start or from where it stopped."""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esper.config import ConfigError, TrainingConfig, checked, read_settings
from esper.leyline import OP_NAMES
from esper.leyline.errors import EsperError
from esper.runner import InterruptedRunError, free_directory
from esper.scripts.flags import Flag, parse_flags
from esper.simic.agent.ppo import shards
from esper.simic.training.vectorized import RoundSummary
from esper.teaching import config_of_run, settings_of, task_of, teach

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

DESCRIPTION = "Teach a policy to decide what grows, and keep the best one."
EXTRA: dict[str, Flag] = {
    "config": (Path | None, None, "TOML or JSON file with settings; flags override it."),
    "resume": (Path | None, None, "Run directory to continue from its last checkpoint."),
    "out": (Path | None, None, "Run directory; a new one below runs/ unless given."),
    "processes": (int, 1, "Processes that share the environments; their number changes no result."),
}
SENTENCES_VARIABLE = "ESPER_SENTENCES"
"""Folder in which each of several processes leaves why it ended."""
LOST_OTHERS = 3
"""Exit code of a process that ended because another one had."""


def train_command(
    args: Sequence[str], *, prog: str = "esper train", renamed: dict[str, str] | None = None
) -> None:
    """Parse ``args`` and train."""
    given, extra = parse_flags(TrainingConfig, prog, DESCRIPTION, args, renamed=renamed, extra=EXTRA)
    config, directory = _resolve(given, extra)
    task_of(config)
    processes = int(extra["processes"])
    groups = len(shards(config.envs, settings_of(config).shard_envs))
    if not 1 <= processes <= groups:
        raise ConfigError(
            f"{processes} processes were asked for; {config.envs} environments form {groups} shards of up to"
            f" {settings_of(config).shard_envs}, so 1 to {groups} are possible"
        )
    resume = extra["resume"] is not None
    try:
        if processes == 1:
            teach(config, directory, resume=resume, on_round=RoundPrinter(config.rounds))
        else:
            _launch(config, directory, processes, resume)
    except KeyboardInterrupt:
        raise InterruptedRunError(
            f"interrupted; go on from the last checkpoint with esper train --resume {directory}"
        ) from None
    print(
        f"best policy in {directory / 'best'};"
        f" compare it with: esper eval {directory / 'best'} --task {config.task}"
    )


def _resolve(given: dict[str, Any], extra: dict[str, Any]) -> tuple[TrainingConfig, Path]:
    if extra["resume"] is not None:
        if given or extra["config"] or extra["out"]:
            raise ConfigError("a resumed run keeps its own settings; --resume goes with --processes only")
        return config_of_run(extra["resume"]), extra["resume"]
    settings = read_settings(extra["config"]) if extra["config"] else {}
    config = checked(TrainingConfig, {**settings, **given})
    name = f"{config.task}-ppo-seed{config.rng_seed}"
    return config, extra["out"] or free_directory(name)


def _launch(config: TrainingConfig, directory: Path, processes: int, resume: bool) -> None:
    """Hand the run to torchrun; the first process prints and writes."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    with tempfile.TemporaryDirectory() as folder, _lent_to_torchrun():
        file, sentences = Path(folder) / "config.json", Path(folder) / "sentences"
        file.write_text(config.model_dump_json())
        sentences.mkdir()
        os.environ[SENTENCES_VARIABLE] = str(sentences)
        words = ["--standalone", f"--nproc-per-node={processes}", "-m", "esper.scripts.worker"]
        words += [str(file), str(directory), "resume" if resume else "start"]
        try:
            run(parse_args(words))
        except ChildFailedError as error:
            said = [path.read_text() for path in sorted(sentences.iterdir())]
            raise EsperError(said[0] if said else _end_of(error, processes)) from None
        except SignalException:
            raise KeyboardInterrupt from None


@contextmanager
def _lent_to_torchrun() -> Iterator[None]:
    """Environment, log and signals for torchrun, which reports failures at length; put back afterwards."""
    environment, log = dict(os.environ), logging.root.manager.disable
    taken = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    handlers = {number: signal.getsignal(number) for number in taken}
    os.environ.update(OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="FATAL")
    logging.disable()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        logging.disable(log)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _end_of(error: ChildFailedError, processes: int) -> str:
    """What became of the process that ended without a word."""
    rank, failure = min(error.failures.items(), key=lambda item: item[1].exitcode == LOST_OTHERS)
    if failure.exitcode < 0:
        return f"process {rank} of {processes} was ended by {failure.signal_name()}"
    return f"process {rank} of {processes} ended with code {failure.exitcode}; see its message above"


class RoundPrinter:
    """One line per round, with the time that is left."""

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds
        self._began = time.monotonic()
        self._first: int | None = None

    def __call__(self, summary: RoundSummary) -> None:
        if self._first is None:
            self._first = summary.round - 1
        done = summary.round - self._first
        left = (time.monotonic() - self._began) / done * (self._rounds - summary.round)
        metrics = summary.metrics
        shares = " ".join(
            f"{name.lower()} {100 * share:.0f}%"
            for name, share in zip(OP_NAMES, summary.op_shares, strict=True)
            if share > 0
        )
        line = (
            f"round {summary.round}/{self._rounds}  left {left / 60:.0f} min"
            f"  return {summary.mean_return:+.2f}"
            f"  score {_number(summary.val_score, '.1f')}  params {_number(summary.params, '.0f')}"
            f"  ev {metrics.explained_variance:+.2f}  kl {metrics.approx_kl:.3f}"
            f"  entropy {metrics.entropy:.2f}  {shares}"
        )
        if summary.evaluation_return is not None:
            line += f"  | evaluation: return {summary.evaluation_return:+.2f}"
            line += f", score {_number(summary.evaluation_score, '.1f')}"
        if summary.anomalies:
            line += f"  | {', '.join(summary.anomalies)}"
        if metrics.skipped:
            line += f"  | update left out: {metrics.skipped}"
        print(line, flush=True)


def _number(value: float | None, form: str) -> str:
    return "unknown" if value is None else format(value, form)
