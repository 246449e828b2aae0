"""Runs one controller over its episodes and leaves a run directory behind."""

from collections.abc import Callable
from pathlib import Path

from esper.build import build_controller, build_task, build_vector, describe_run, one_thread
from esper.config import RunConfig
from esper.karn.run import read_rows
from esper.kasmina.export import save_committed
from esper.leyline.errors import InterruptedRunError
from esper.leyline.rows import EpochRow
from esper.nissa.writer import RunWriter
from esper.telemetry import Telemetry
from esper.tolaria.episode import run_episode
from esper.tolaria.twin import run_without_growth


def free_directory(name: str, base: Path = Path("runs")) -> Path:
    """``base / name``, or that with the first number at which nothing exists yet."""
    candidate, number = base / name, 1
    while candidate.exists():
        number += 1
        candidate = base / f"{name}-{number}"
    return candidate


def check_names(config: RunConfig) -> None:
    """Find unknown names, and plans that do not fit, before anything is run or written."""
    task = build_task(config)
    vector = build_vector(config, task)
    vector.reset(0)
    for name in (config.controller, *config.against):
        build_controller(name, config, vector.action_space)


def run_arm(
    config: RunConfig, controller_name: str, directory: Path, refresh: Callable[[], None] = lambda: None
) -> Path:
    """Run all episodes of one controller; telemetry and networks are written to ``directory``.

    ``refresh`` is called whenever rows were written.
    """
    task = build_task(config)
    with one_thread(), RunWriter(directory, detail=config.detail) as writer:
        vector = build_vector(config, task)
        env = vector.envs[0]
        env.reset(0)
        controller = build_controller(controller_name, config, vector.action_space)
        run = describe_run(config, controller_name, directory.name, env)
        env.sink = Telemetry(run, writer)
        env.sink.emit(run)

        def flush() -> None:
            writer.flush()
            refresh()

        flush()
        try:
            for episode in range(config.episodes):
                twin = None
                if controller_name != "off":
                    twin = run_without_growth(
                        task, rng_seed=config.rng_seed, episode=episode, compute=env.compute
                    ).val_scores
                run_episode(vector, controller, episode, twin_scores=twin, after_epoch=flush)
                save_committed(env.model, directory / "model" / f"episode-{episode}")
        except KeyboardInterrupt:
            writer.close()
            finished = sum(row.episode == env.episode for row in read_rows(directory, EpochRow))
            raise InterruptedRunError(
                f"interrupted in episode {env.episode}, epoch {finished + 1} of {task.horizon};"
                f" the {finished} finished epochs of this episode and everything before it are readable"
                f" in {directory}"
            ) from None
    return directory
