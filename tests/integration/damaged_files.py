"""Reading of randomly damaged files of each kind: telemetry, checkpoints, studies and saved networks.

A damaged file may be read with other values than before or be refused by an error of Esper; no other
exception may leave Esper, and nothing else may change. The tests damage some files of each kind; many more:

    PYTHONPATH=src python -m tests.integration.damaged_files 400
"""

import contextlib
import io
import random
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from unittest import mock

import torch
from torch import nn

import esper
from esper.leyline.errors import EsperError
from esper.run.checkpoint_file import CHECKPOINT
from esper.run.policy_training import train
from esper.run.train_checkpoint import config_of_run
from esper.scripts import cli
from esper.scripts.guard import USAGE_ERROR
from esper.simic.training.trainer import Trainer
from esper.study import study
from esper.tamiyo.policy.checkpoint import load_policy
from esper.tolaria.tasks import TASKS
from tests.growth.interrupts import differences, state_of
from tests.growth.test_grow import grow, network
from tests.integration.damage import damaged
from tests.integration.hostile import readings
from tests.integration.training import prepare, tiny
from tests.study import building


class Kind(NamedTuple):
    """Kind of files that are damaged."""

    originals: tuple[str, ...]
    """Names of the folders that contain undamaged files."""
    pattern: str
    """Glob pattern of the files that are damaged."""
    read: Callable[[random.Random, Path], bool]
    """Function that reads a damaged copy of a folder; returns whether it was refused."""


def write_originals(folder: Path) -> None:
    """Write undamaged files of every kind to the new folder ``folder``; the task "tiny" is registered."""
    folder.mkdir()
    train(tiny(iterations=2, detail="full"), folder / "training")
    words = ["--task", "tiny", "--steps", "4", "--controller", "periodic", "--json"]
    with contextlib.redirect_stdout(io.StringIO()):
        cli.main(["run", *words, "--out", str(folder / "run")])
    grown = grow(network(), epochs=2, controller="mlp@0:1", show=lambda _: None, out=folder / "grown")
    grown.save(folder / "networks" / "users.safetensors")
    shutil.copytree(folder / "run" / "model", folder / "networks" / "built-in")
    shutil.copytree(folder / "training" / "best", folder / "networks" / "policy")
    (folder / "study").mkdir()
    arms = 'tasks = ["tiny_scaling"]\narms = ["static:1"]\nbudget = "120M"\nsteps = 4\nmarks = [1.0]\n'
    seeds = "rng_seeds = 1\nselection_rng_seeds = 0\nlearning_rate_factors = [1.0]\n"
    (folder / "study" / "study.toml").write_text(arms + seeds)
    study.run_study(*study_in(folder / "study"))


def study_in(folder: Path) -> tuple[Path, Path, int, Callable[[str], None], Callable[[str], None]]:
    """Return the arguments of ``run_study`` for the study in a folder."""
    return folder / "study.toml", folder / "out", 1, lambda _: None, lambda _: None


# --- readers --------------------------------------------------------------------------------------


def read_telemetry(rng: random.Random, run: Path) -> bool:
    """Read the run by two commands; return whether one was refused."""
    return sum(is_refused(words) for words in readings(rng, run)) > 0


def is_refused(words: list[str]) -> bool:
    """Run a command, which must succeed or end with one sentence; return whether it was refused."""
    code: object = 0
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            cli.main(words)
        except SystemExit as end:
            code = end.code
    text = said.getvalue()
    assert code in (0, USAGE_ERROR), (words, code, text)
    assert code == 0 or text.splitlines()[-1].startswith("esper: "), (words, text)
    return code != 0


def read_checkpoint(rng: random.Random, run: Path) -> bool:
    """Resume a training, which does nothing if it is not refused."""
    with mock.patch.object(Trainer, "__iter__", return_value=iter(())):
        return fails(lambda: train(config_of_run(run), run, resume=True))


def read_grow_checkpoint(rng: random.Random, run: Path) -> bool:
    """Resume a growth; a refusal changes neither network nor optimiser."""
    net = network()
    optimizer = torch.optim.AdamW(net.parameters())
    before = state_of([net], optimizer, None)
    loads = partial(grow, net, epochs=2, controller="mlp@0:1", show=len, optimizer=optimizer)
    refused = fails(lambda: loads(out=run, resume=True))
    assert not refused or differences(state_of([net], optimizer, None), before) == []
    return refused


def read_study(rng: random.Random, folder: Path) -> bool:
    """Continue a study; runs that are missing in its journal are refused instead of made."""

    def missing(*_: object) -> None:
        raise EsperError("a run is missing")

    with mock.patch.object(study, "do_run", missing):
        return fails(lambda: study.run_study(*study_in(folder)))


def read_networks(rng: random.Random, folder: Path) -> bool:
    """Load all saved networks; a refusal does not change the network that is loaded into."""
    net = network()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    refused = fails(lambda: esper.load(folder / "users.safetensors", base=net))
    assert not refused or differences(dict(net.state_dict()), before) == []
    loads: list[Callable[[], nn.Module | object]] = [partial(load_policy, folder / "policy")]
    loads += [partial(esper.load, path) for path in (folder / "built-in").glob("*.safetensors")]
    return any([refused, *map(fails, loads)])


def fails(read: Callable[[], object]) -> bool:
    """Return whether a function was refused by an error of Esper; any other exception is passed on."""
    try:
        read()
    except EsperError:
        return True
    return False


KINDS = {
    "telemetry": Kind(("training", "run", "grown"), "telemetry/**/*", read_telemetry),
    "checkpoint": Kind(("training",), CHECKPOINT, read_checkpoint),
    "grow checkpoint": Kind(("grown",), CHECKPOINT, read_grow_checkpoint),
    "study": Kind(("study",), "**/*", read_study),
    "network": Kind(("networks",), "**/*", read_networks),
}


def check_damaged(kind: Kind, originals: Path, folder: Path, count: int, rng_seed: int = 13) -> int:
    """Damage and read ``count`` files of one kind; return the number of those that were refused.

    Raises:
        AssertionError: Another exception than an error of Esper has left Esper.
    """
    rng, refused = random.Random(rng_seed), 0
    for _ in range(count):
        original = originals / rng.choice(kind.originals)
        copy, how = damaged(rng, original, folder, kind.pattern)
        try:
            refused += kind.read(rng, copy)
        except Exception as error:
            raise AssertionError(f"{how} of {original.name}: {error!r}") from error
    return refused


def main() -> None:
    """Damage and read files of all kinds, as many of each as the argument says."""
    count = int(sys.argv[1])
    with TemporaryDirectory() as folder:
        prepare(Path(folder, "cache"))
        TASKS[building.NAME] = building.TASK
        originals = Path(folder, "originals")
        write_originals(originals)
        for name, kind in KINDS.items():
            began = time.process_time()
            refused = check_damaged(kind, originals, Path(folder, "damaged"), count)
            seconds = time.process_time() - began
            sys.stdout.write(f"{name}: {count} damaged, {refused} refused, {seconds:.0f} CPU s\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
