"""A training run in several processes: the same run bit for bit, and a sentence when they fall apart."""

import importlib
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import pytest
from torch.distributed import DistNetworkError
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from esper.karn.query import read_rows
from esper.leyline.errors import EsperError
from esper.leyline.events import EpochRow
from esper.scripts import cli
from esper.scripts.guard import USAGE_ERROR
from esper.scripts.train_command import LOST_OTHERS
from esper.simic.training.vectorized import Trainer
from tests.integration.training import Refused, assert_same_end, prepare, rows_without_times, sentence_from

ROOT = Path(__file__).parents[2]
WORDS = shlex.split(
    "train --task tiny --reward-family loss --hidden-dim 16 --envs 6 --iterations 3 --update-epochs 2"
    " --evaluate-episodes 5 --evaluate-every 2 --checkpoint-every 1"
)
"""Three shards of two environments, and three of episodes to evaluate with."""
MISHAP = "ESPER_TEST_MISHAP"

IN_EVERY_WORKER = """
import os
if "RANK" in os.environ:
    from tests.integration.test_processes import prepare_worker
    prepare_worker()
"""


def prepare_worker() -> None:
    """What happens in every process that torchrun starts, before anything else."""
    prepare(Path(os.environ["ESPER_CACHE"]))
    if os.environ.get(MISHAP) and os.environ["RANK"] == "1":
        be_killed_in_the_third_iteration()


def be_killed_in_the_third_iteration() -> None:
    run_iteration = Trainer.run_iteration

    def fatal(trainer: Trainer) -> object:
        if trainer.iteration == 2:
            time.sleep(1.0)  # the others are waiting by then
            os.kill(os.getpid(), signal.SIGKILL)
        return run_iteration(trainer)

    Trainer.run_iteration = fatal  # type: ignore[method-assign]


@pytest.fixture(scope="module", autouse=True)
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """This process and all that it starts know the tiny task and share their twins."""
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "sitecustomize.py").write_text(IN_EVERY_WORKER)
    path = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        prepare(folder / "cache", patch)
        yield


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run by one process."""
    out = tmp_path_factory.mktemp("alone") / "run"
    cli.main([*WORDS, "--out", str(out)])
    return out


def test_processes_give_the_same_run_bit_for_bit(alone: Path, tmp_path: Path) -> None:
    cli.main([*WORDS, "--processes", "2", "--out", str(tmp_path / "run")])
    assert_same_end(alone, tmp_path / "run")


def test_a_run_that_loses_a_process_says_so_and_is_resumed_by_one(
    alone: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    out = tmp_path / "lost" / "run"
    began = time.monotonic()
    monkeypatch.setenv(MISHAP, "killed")
    with pytest.raises(SystemExit) as stop:
        cli.main([*WORDS, "--processes", "2", "--out", str(out)])
    monkeypatch.delenv(MISHAP)
    assert stop.value.code == 2
    assert capfd.readouterr().err == "esper: process 1 of 2 was ended by SIGKILL\n"
    assert not caplog.records, "torchrun's own account"
    assert 1 <= len(rows_without_times(out)["update"]) <= 2
    rows = read_rows(out, EpochRow)
    assert all(0 < row.t < time.monotonic() - began for row in rows), "all processes count the run's own time"
    seen = [(row.episode, row.env, row.epoch) for row in rows]
    assert len(set(seen)) == len(seen)
    assert set(product((0, 1), range(6), (1, 2))) <= set(seen)
    cli.main(["train", "--resume", str(out), "--processes", "1"])
    assert_same_end(alone, out)


# --- what a single worker says --------------------------------------------------------------------


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The worker's program with its arguments; not imported above, since a worker imports this file first."""
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "config.json"), str(tmp_path / "run"), "start"])
    return importlib.import_module("esper.scripts.worker")


def fail(error: Exception, *args: object, **options: object) -> NoReturn:
    raise error


def test_the_sentence_of_a_worker_is_the_one_shown(
    worker: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    """The second of two fails by itself, and the first because the other is gone."""
    failures = (worker.LostProcessError("another process is gone"), EsperError("no twin, for a test"))
    codes = []

    def run_two_workers(_: object) -> None:
        for rank, failure in enumerate(failures):
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setattr(worker, "main", partial(fail, failure))
            with pytest.raises(SystemExit) as left:
                worker.work()
            codes.append(left.value.code)
        raise ChildFailedError("workers", {1: ProcessFailure(1, 0, 2, "none")})

    monkeypatch.setattr(worker, "_leave", sys.exit)  # os._exit would end this process
    monkeypatch.setattr("torch.distributed.run.run", run_two_workers)
    said = refused(*WORDS, "--processes", "2", "--out", tmp_path / "run")
    assert said == "esper: no twin, for a test\n"
    assert codes == [LOST_OTHERS, USAGE_ERROR]


@pytest.mark.parametrize(
    "loss", [DistNetworkError("Failed to recv, got 0 bytes"), RuntimeError("[gloo] connection closed")]
)
def test_a_worker_whose_others_are_gone_says_so(
    loss: RuntimeError, worker: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_meet", lambda: None)
    monkeypatch.setattr(worker, "train", partial(fail, loss))
    monkeypatch.setattr(worker.exchange, "rank", lambda: 1)
    with pytest.raises(worker.LostProcessError, match="another process of the run is gone"):
        worker.main()


@pytest.fixture
def meet(worker: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Refused:
    """Lets this process wait as the first of two, the second of which nobody starts; settings may differ."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}

    def refusal(**settings: str) -> str:
        waiting = {"RANK": "0", "WORLD_SIZE": "2", "ESPER_ARRIVAL_SECONDS": "1"}
        for name, value in {**place, **waiting, **settings}.items():
            monkeypatch.setenv(name, value)
        said = sentence_from(capfd, worker.work)
        assert said.startswith("esper: the processes of the run did not come together: ")
        return said

    return refusal


def test_a_process_that_never_arrives_is_not_waited_for_for_ever(meet: Refused, tmp_path: Path) -> None:
    began = time.monotonic()
    assert "1/2 clients joined" in meet()
    assert time.monotonic() - began < 60, "the limit is a second"
    assert not (tmp_path / "run").exists()


def test_a_busy_port_gets_a_sentence(meet: Refused) -> None:
    with socket.socket() as busy:
        busy.bind(("", 0))
        busy.listen()
        assert "EADDRINUSE" in meet(MASTER_PORT=str(busy.getsockname()[1]))


@pytest.mark.parametrize("settings", [{"RANK": "first"}, {"MASTER_PORT": "harbour"}])
def test_a_worker_without_its_place_gets_a_sentence(settings: dict[str, str], meet: Refused) -> None:
    meet(**settings)
