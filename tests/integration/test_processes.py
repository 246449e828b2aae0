"""A training run in several processes: the same run bit for bit, and a sentence when they fall apart."""

import importlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest
import torch
from torch.distributed import DistNetworkError, FileStore, HashStore, TCPStore
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from esper.karn.query import read_rows
from esper.leyline.errors import EsperError
from esper.leyline.events import EpochRow, Row
from esper.nissa.journal import IterationJournal
from esper.run_state import FinishedRunError, config_of_run
from esper.scripts import cli
from esper.scripts.guard import USAGE_ERROR
from esper.scripts.train_command import LOST_OTHERS, train_command
from esper.simic.agent.ppo import PPOAgent
from esper.simic.training import exchange, meeting
from esper.training import train
from tests.integration.training import (
    Refused,
    assert_same_end,
    forked,
    prepare,
    rows_without_times,
    sentence_from,
    tiny,
)

ROOT = Path(__file__).parents[2]
WORDS = shlex.split(
    "train --task tiny --reward-family loss --hidden-dim 16 --envs 6 --iterations 3 --update-epochs 2"
    " --evaluate-episodes 5 --evaluate-every 2 --checkpoint-every 1"
)
"""Three shards of two environments, and three of episodes to evaluate with."""
SECONDS = 600.0
"""To catch hangs; on an idle machine nothing here takes a tenth of it."""
MISHAPS = "ESPER_TEST_MISHAPS"
"""Folder with a file RANK-ITERATION for each process that is to be killed, once, within an iteration."""

IN_EVERY_WORKER = """
import os
if "RANK" in os.environ:
    from tests.integration.test_processes import prepare_worker
    prepare_worker()
"""


def prepare_worker() -> None:
    """What happens in every process that torchrun starts, before anything else."""
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
        if any(mishaps.glob(f"*-{iteration}")):
            time.sleep(0.5)  # so that a shard is left for the one that is to be killed

    IterationJournal.take = fatal  # type: ignore[method-assign]


@pytest.fixture
def mishaps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "mishaps"
    folder.mkdir()
    monkeypatch.setenv(MISHAPS, str(folder))
    return folder


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


# --- two machines: two torchruns that meet over the loopback ------------------------------------------


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def start_machine(log: Path, port: int, *words: str) -> subprocess.Popen[bytes]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    torchrun += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--max-restarts=2"]
    with log.open("wb") as said:
        return subprocess.Popen(
            [*torchrun, "-m", "esper.scripts.train", "ppo", *words], stdout=said, stderr=subprocess.STDOUT
        )


def test_machines_start_again_what_was_killed_and_come_to_the_bit_equal_end(
    alone: Path, tmp_path: Path, mishaps: Path
) -> None:
    """Rank 1 before the first checkpoint, so that the run begins anew; then rank 0, which writes."""
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
    assert f"with --resume {out} in place of other flags" in said, "each survivor says how to go on"
    assert said.count(f"best policy in {out / 'best'}") == 1


# --- what processes find out about each other while they train ---------------------------------------


def take_part(rank: int, folder: Path, out: Path, drifts: bool) -> None:
    """A process of two; what it says is left in a file."""
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
    """Run two processes with a run directory each, of which the second may drift: their sentences."""

    def said(one: Path, other: Path, drifts: bool) -> list[str]:
        parts = [forked(take_part, 0, tmp_path, one, False), forked(take_part, 1, tmp_path, other, drifts)]
        for part in parts:
            part.join(SECONDS)
        return [(tmp_path / f"said-{rank}").read_text() for rank in (0, 1)]

    return said


def test_a_rank_with_another_run_directory_is_found_out(
    said_by_two: Callable[[Path, Path, bool], list[str]], tmp_path: Path
) -> None:
    own, other = tmp_path / "run", tmp_path / "elsewhere"
    for directory, sentence in zip((own, other), said_by_two(own, other, False), strict=True):
        expected = f"rank 1 does not see the run directory '{directory}' as rank 0 does; name one that all"
        assert sentence == f"{expected} machines share"


def test_ranks_that_come_to_different_policies_stop(
    said_by_two: Callable[[Path, Path, bool], list[str]], tmp_path: Path
) -> None:
    sentences = said_by_two(tmp_path / "run", tmp_path / "run", True)
    assert sentences[0] == sentences[1]
    assert sentences[0].startswith("after iteration 1 the policy of rank 1 is not that of rank 0, since")


# --- what a single worker says --------------------------------------------------------------------


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The worker's module; not imported above, since a worker imports this file before it is prepared."""
    monkeypatch.setattr(os, "_exit", sys.exit)
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
            monkeypatch.setattr(worker, "_take_part", partial(fail, failure))
            with pytest.raises(SystemExit) as left:
                worker.work(tiny(), tmp_path / "run", resume=False)
            codes.append(left.value.code)
        raise ChildFailedError("workers", {1: ProcessFailure(1, 0, 2, "none")})

    monkeypatch.setattr("torch.distributed.run.run", run_two_workers)
    said = refused(*WORDS, "--processes", "2", "--out", tmp_path / "run")
    assert said == "esper: no twin, for a test\n"
    assert codes == [LOST_OTHERS, USAGE_ERROR]


@pytest.mark.parametrize(
    "loss", [DistNetworkError("Failed to recv, got 0 bytes"), RuntimeError("[gloo] connection closed")]
)
def test_a_worker_whose_others_are_gone_says_how_to_go_on(
    loss: RuntimeError, worker: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_meet", lambda config: HashStore())
    monkeypatch.setattr(worker, "train_and_show", partial(fail, loss))
    with pytest.raises(worker.LostProcessError, match=r"another process of the run is gone; .* --resume "):
        worker._take_part(tiny(), tmp_path / "run", False)


def wait_for_others(out: Path, said: Path) -> None:
    """Wait as gloo does, where Python runs no handler of a signal."""
    from esper.scripts.worker import speak_when_stopped

    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
    speak_when_stopped(out)
    store = HashStore()
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    store.wait(["nothing"], timedelta(seconds=SECONDS))


def test_a_worker_that_torchrun_stops_says_how_to_go_on(tmp_path: Path) -> None:
    child = forked(wait_for_others, tmp_path / "run", tmp_path / "said")
    child.join(SECONDS)
    assert child.exitcode == USAGE_ERROR
    said = (tmp_path / "said").read_text()
    assert said.startswith("esper: torchrun stopped this process; if torchrun does not start all of them")
    assert f" with --resume {tmp_path / 'run'} in place of other flags\n" in said


@pytest.fixture
def start(
    worker: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Refused:
    """Starts the command here as torchrun would: as the first of two, the second of which nobody starts."""
    monkeypatch.setattr(worker, "speak_when_stopped", lambda directory: None)  # signals here are pytest's
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANK": "0", "WORLD_SIZE": "2"}

    def refusal(*words: str, **settings: str) -> str:
        of_torchrun = {**place, "TORCHELASTIC_RUN_ID": "none", "ESPER_ARRIVAL_SECONDS": "1"}
        for name, value in {**of_torchrun, **settings}.items():
            monkeypatch.setenv(name, value)
        flags = words or ("--out", str(tmp_path / "run"))
        return sentence_from(capfd, lambda: train_command([*WORDS[1:], *flags]))

    return refusal


APART = "esper: the processes of the run did not come together: "


def test_a_process_that_never_arrives_is_not_waited_for_for_ever(start: Refused, tmp_path: Path) -> None:
    began = time.monotonic()
    said = start()
    assert said.startswith(APART)
    assert "1/2 clients joined" in said
    assert time.monotonic() - began < 60, "the limit is a second"
    assert not (tmp_path / "run").exists()


def test_ranks_with_other_settings_or_versions_are_refused_by_name(
    start: Refused, worker: ModuleType
) -> None:
    """The other rank, a thread, was told another rng seed and has another version of torch."""
    of_torchrun = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    port = of_torchrun.port

    def other_rank() -> str:
        store = TCPStore("127.0.0.1", port, 2, is_master=False, timeout=timedelta(seconds=SECONDS))
        common = {**worker._common(tiny()), "rng_seed": 7, "torch": "2.0.0"}
        with pytest.raises(meeting.MeetingError) as refusal:
            meeting.meet(store, 1, 2, common, SECONDS)
        return str(refusal.value)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(other_rank)
        place = {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        said = start(**place, ESPER_ARRIVAL_SECONDS=str(SECONDS))
        assert said == f"{APART}{other.result()}\n"
    assert "; rng_seed is 0 on rank 0 and 7 on rank 1 (" in said
    assert f"; torch is {torch.__version__} on rank 0 and 2.0.0 on rank 1 (" in said


def test_a_busy_port_gets_a_sentence(start: Refused) -> None:
    with socket.socket() as busy:
        busy.bind(("", 0))
        busy.listen()
        assert "EADDRINUSE" in start(MASTER_PORT=str(busy.getsockname()[1]))


@pytest.mark.parametrize("settings", [{"RANK": "first"}, {"MASTER_PORT": "harbour"}])
def test_a_worker_without_its_place_gets_a_sentence(settings: dict[str, str], start: Refused) -> None:
    assert start(**settings).startswith(APART)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--processes", "2", "--out", "run"), "say --nproc-per-node instead of --processes"),
        (("--rent", "0.01"), "name the run directory with --out"),
    ],
)
def test_what_torchrun_needs_to_be_told_is_said(words: tuple[str, ...], said: str, start: Refused) -> None:
    assert said in start(*words)


# --- whose run it is that a directory holds ------------------------------------------------------------


def test_a_run_of_somebody_else_is_not_gone_on_with(worker: ModuleType, tmp_path: Path) -> None:
    """torchrun starts processes again even if they were refused: what they found then is found once more."""
    store = HashStore()
    (tmp_path / "telemetry").mkdir()
    assert [worker._begun_before(store, tmp_path, False) for _ in range(2)] == [False, False]
    assert [worker._begun_before(store, tmp_path, True) for _ in range(2)] == [False, True]


def test_a_run_that_was_finished_before_a_rank_died_is_finished(
    alone: Path, worker: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = HashStore()
    monkeypatch.setattr(worker, "_meet", lambda config: store)
    config = config_of_run(alone)
    with pytest.raises(FinishedRunError):
        worker._take_part(config, alone, True)
    worker._take_part(config, alone, True)
