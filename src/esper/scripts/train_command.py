"""``esper train``: train a policy in one or several processes, or resume a training."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from esper.leyline import InterruptedRunError, printable
from esper.run.run_config import PRESETS, ConfigError, Settings, checked, read_settings, training_config
from esper.scripts.flags import parse_flags, say_where
from esper.simic.config import TrainingConfig

TORCHRUN_VARIABLE = "TORCHELASTIC_RUN_ID"
"""Environment variable that torchrun sets in the processes that it starts."""


class TrainFlags(Settings):
    """Train a policy that decides what grows, and keep the best one."""

    preset: str | None = Field(None, description=f"Settings by name: {', '.join(PRESETS)}; others override.")
    config: Path | None = None
    """TOML or JSON file with settings; flags override it."""
    resume: Path | None = None
    """Run directory of the training to resume from its last checkpoint."""
    out: Path | None = None
    """Run directory; a new one below runs/ unless given."""
    episodes: int | None = None
    """Total number of episodes: environments times iterations."""
    processes: int = 1
    """Number of processes that run the environments; on CPUs, results do not depend on it."""


def train_command(
    args: Sequence[str], *, prog: str = "esper train", renamed: dict[str, str] | None = None
) -> None:
    fields = TrainingConfig.model_fields | TrainFlags.model_fields
    given = parse_flags(fields, prog, TrainFlags.__doc__, args, renamed)
    flags = checked(TrainFlags, {name: given.pop(name) for name in TrainFlags.model_fields if name in given})
    from esper.run.policy_training import task_of

    config, directory = _resolve(given, flags)
    task_of(config)
    if os.environ.get("RANK", "0") == "0":
        say_where(config)
    check_processes(flags.processes, config)
    resume = flags.resume is not None
    try:
        if TORCHRUN_VARIABLE in os.environ:
            from esper.scripts.worker import work

            work(config, directory, resume=resume)
        elif flags.processes == 1:
            train_and_show(config, directory, resume=resume)
        else:
            from esper.scripts.launcher import launch

            launch(config, directory, flags.processes, resume=resume)
    except KeyboardInterrupt:
        raise interrupted(directory) from None
    print_best(directory)


def interrupted(directory: Path) -> InterruptedRunError:
    """Return the error after Ctrl-C, which names what can be resumed."""
    from esper.run.checkpoint_file import CHECKPOINT
    from esper.run.train_checkpoint import CONFIG_FILE

    if not (directory / CONFIG_FILE).exists():
        return InterruptedRunError("interrupted before anything was saved; run the same command again")
    start = "from the beginning, as there is no checkpoint yet,"
    if (directory / CHECKPOINT).exists():
        start = "from the last checkpoint"
    return InterruptedRunError(f"interrupted; go on {start} with esper train --resume {directory}")


def check_processes(processes: int, config: TrainingConfig) -> None:
    from esper.simic.agent.ppo import shards
    from esper.simic.training.trainer import SHARD_ENVS

    groups = len(shards(config.envs, SHARD_ENVS))
    if not 1 <= processes <= groups:
        raise ConfigError(
            f"{processes} processes were asked for; {config.envs} environments form {groups} shards of up to"
            f" {SHARD_ENVS}, so 1 to {groups} are possible"
        )


def print_best(directory: Path) -> None:
    """Print the folder of the best policy, and the command that evaluates this policy."""
    best = directory / "best"
    command = shlex.join(["esper", "eval", str(best)])
    print(printable(f"best policy in {best}; compare it with: {command}"))


def _resolve(given: dict[str, Any], flags: TrainFlags) -> tuple[TrainingConfig, Path]:
    from esper.run.arm import free_directory
    from esper.run.train_checkpoint import config_of_run

    if TORCHRUN_VARIABLE in os.environ:
        if "processes" in flags.model_fields_set:
            raise ConfigError("torchrun starts the processes: say --nproc-per-node instead of --processes")
        if flags.out is None and flags.resume is None:
            raise ConfigError(
                "name the run directory with --out: all processes of torchrun must find the same"
            )
    if flags.resume is not None:
        if given or flags.model_fields_set - {"resume", "processes"}:
            raise ConfigError("a resumed run keeps its own settings; --resume goes with --processes only")
        return config_of_run(flags.resume), flags.resume
    settings = read_settings(flags.config) if flags.config else {}
    config = training_config(flags.preset, settings, given)
    if flags.episodes is not None:
        if "iterations" in given:
            raise ConfigError("--episodes and --iterations both say how long to train; give one of them")
        config = _of_episodes(config, flags.episodes)
    return config, flags.out or free_directory(f"{config.task}-ppo-seed{config.rng_seed}")


def _of_episodes(config: TrainingConfig, episodes: int) -> TrainingConfig:
    """Return the configuration with enough iterations for ``episodes`` episodes, and at most ``episodes``
    environments."""
    envs = max(1, min(config.envs, episodes))
    iterations = max(episodes, 0) // envs + (episodes % envs > 0)
    total = iterations * envs
    if total != episodes > 0:
        shape = f"{iterations} iterations of {envs} environments"
        print(f"{episodes} episodes are rounded up to {total}: {shape}")
    return checked(TrainingConfig, {**config.model_dump(), "envs": envs, "iterations": iterations})


def train_and_show(config: TrainingConfig, directory: Path, *, resume: bool) -> None:
    """Train a policy and show the progress on standard output; a resumed training shows only new
    iterations."""
    from rich.console import Console

    from esper.karn.terminal import TerminalView
    from esper.run.policy_training import train

    with TerminalView(directory, Console(), skip_past=resume) as view:
        train(config, directory, resume=resume, refresh=view.refresh)
