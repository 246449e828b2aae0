"""Execution of all episodes of one controller, written to a run directory."""

from collections.abc import Callable
from itertools import chain, count
from pathlib import Path

from esper.karn.run import read_rows
from esper.kasmina.network_file import save
from esper.leyline import Controller, EpochRow, InterruptedRunError
from esper.nissa.writer import RunWriter
from esper.run.factories import build_controller, build_vector, describe_run, one_thread
from esper.run.row_sink import RowSink
from esper.run.run_config import RunConfig
from esper.tolaria.env import EpisodeReport
from esper.tolaria.episode import run_episode
from esper.tolaria.twin import run_without_growth
from esper.tolaria.vector import SerialVector


def free_directory(name: str) -> Path:
    """Return the path ``runs/name``; if it exists, ``runs/name-2`` or the next free number."""
    names = chain([name], (f"{name}-{number}" for number in count(2)))
    return next(path for path in map(Path("runs").joinpath, names) if not path.exists())


def check_names(config: RunConfig) -> None:
    """Raise an error if a name is unknown or a plan does not fit, before anything is run or written."""
    vector, _ = _start(config, config.controller)
    for name in config.against:
        build_controller(name, config, vector.action_space)


def run_one_episode(config: RunConfig, episode: int = 0) -> EpisodeReport:
    """Run one episode of the configured controller without writing files, and return the report of the
    episode.
    """
    with one_thread():
        (report,) = run_episode(*_start(config, config.controller, episode), episode)
    return report


def _start(config: RunConfig, controller_name: str, episode: int = 0) -> tuple[SerialVector, Controller]:
    """Return an environment at the start of an episode, and a new controller of the environment."""
    vector = build_vector(config)
    vector.reset(episode)
    return vector, build_controller(controller_name, config, vector.action_space)


def run_arm(
    config: RunConfig, controller_name: str, directory: Path, refresh: Callable[[], None] = lambda: None
) -> Path:
    """Run all episodes of one controller and write telemetry and networks to a run directory.

    Args:
        config: Configuration of the run; its ``controller`` is ignored.
        controller_name: Name of the controller that decides in all episodes.
        directory: Run directory, which must be new.
        refresh: Function that is called after rows were written.

    Returns:
        Path of the run directory.

    Raises:
        InterruptedRunError: Ctrl-C was pressed; the message states which epochs were written.
        SaveError: The run is over, but rows or networks could not be written.
    """
    with one_thread(), RunWriter(directory, detail=config.detail) as writer:
        vector, controller = _start(config, controller_name)
        (env,) = vector.envs
        run = describe_run(config, controller_name, directory.name, env)
        env.recorder.sink = sink = RowSink(run, writer)
        sink.emit(run)

        def flush() -> None:
            writer.flush()
            refresh()

        flush()
        try:
            for episode in range(config.episodes):
                twin = None
                if controller_name != "off":
                    twin = run_without_growth(
                        env.task, rng_seed=config.rng_seed, episode=episode, compute=env.compute
                    ).val_scores
                run_episode(vector, controller, episode, twin_scores=twin, after_epoch=flush)
                name = f"model/episode-{episode}.safetensors"
                with writer.attempt(name):
                    save(env.model.host, directory / name)
        except KeyboardInterrupt:
            writer.close()
            finished = sum(row.episode == env.episode for row in read_rows(directory, EpochRow))
            raise InterruptedRunError(
                f"interrupted in episode {env.episode}, epoch {finished + 1} of {env.task.horizon};"
                f" the {finished} finished epochs of this episode and everything before it are readable"
                f" in {directory}"
            ) from None
    return directory
