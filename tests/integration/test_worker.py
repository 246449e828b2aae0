"""Worker process started by torchrun: lost processes, ranks with different settings, restarts."""

import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import pytest
import torch
from torch.distributed import DistNetworkError, HashStore, TCPStore
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import esper.scripts.worker
from esper.leyline.errors import EsperError
from esper.run.train_checkpoint import FinishedRunError, config_of_run
from esper.scripts.guard import USAGE_ERROR
from esper.scripts.launcher import LOST_OTHERS
from esper.scripts.train_command import train_command
from esper.simic.training import exchange
from tests.integration.training import Refused, forked, free_port, sentence_from, tiny

WORDS = (
    "--task",
    "tiny",
    "--reward-family",
    "loss",
    "--hidden-dim",
    "16",
    "--envs",
    "4",
    "--iterations",
    "3",
)
SECONDS = 600.0
"""Timeout of worker tests in seconds."""
pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the module ``esper.scripts.worker``, with ``os._exit`` replaced by ``sys.exit``."""
    monkeypatch.setattr(os, "_exit", sys.exit)
    return esper.scripts.worker


def fail(error: Exception, *args: object, **options: object) -> NoReturn:
    raise error


def test_train_command_prints_the_error_message_of_the_worker_that_failed(
    worker: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    """Let the second of two worker processes fail, and the first lose its connection to the second."""
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
    said = refused("train", *WORDS, "--processes", "2", "--out", tmp_path / "run")
    assert said == "esper: no twin, for a test\n"
    assert codes == [LOST_OTHERS, USAGE_ERROR]


@pytest.mark.parametrize(
    "loss", [DistNetworkError("Failed to recv, got 0 bytes"), RuntimeError("[gloo] connection closed")]
)
def test_worker_that_lost_another_process_raises_an_error_with_the_resume_command(
    loss: RuntimeError, worker: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_meet", lambda config: HashStore())
    monkeypatch.setattr(worker, "train_and_show", partial(fail, loss))
    with pytest.raises(worker.LostProcessError, match=r"another process of the run is gone; .* --resume "):
        worker._take_part(tiny(), tmp_path / "run", False)


def wait_for_others(out: Path, said: Path) -> None:
    """Block as gloo does while it waits for other ranks, without running Python's signal handlers."""
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
    esper.scripts.worker.speak_when_stopped(out)
    store = HashStore()
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    store.wait(["nothing"], timedelta(seconds=SECONDS))


def test_worker_stopped_by_torchrun_prints_how_to_resume_the_training(tmp_path: Path) -> None:
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
    """Return a function that runs ``esper train`` as rank 0 of two ranks; rank 1 never starts."""
    # The test disables the signal handlers of the worker, because pytest handles signals in this process.
    monkeypatch.setattr(worker, "speak_when_stopped", lambda directory: None)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANK": "0", "WORLD_SIZE": "2"}

    def refusal(*words: str, **settings: str) -> str:
        of_torchrun = {**place, "TORCHELASTIC_RUN_ID": "none", "ESPER_ARRIVAL_SECONDS": "1"}
        for name, value in {**of_torchrun, **settings}.items():
            monkeypatch.setenv(name, value)
        flags = words or ("--out", str(tmp_path / "run"))
        return sentence_from(capfd, lambda: train_command([*WORDS, *flags]))

    return refusal


APART = "esper: the processes of the run did not come together: "


def test_worker_ends_with_a_one_sentence_error_if_the_other_rank_never_arrives(
    start: Refused, tmp_path: Path
) -> None:
    began = time.monotonic()
    said = start()
    assert said.startswith(APART)
    assert "1/2 clients joined" in said
    assert time.monotonic() - began < 200, "the limit is one second; the default is 300"
    assert not (tmp_path / "run").exists()


def test_ranks_with_different_settings_or_versions_are_refused_with_the_differences(
    start: Refused, worker: ModuleType
) -> None:
    """Run rank 1 as a thread with another rng seed and another version of torch than rank 0."""
    of_torchrun = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    port = of_torchrun.port

    def other_rank() -> str:
        store = TCPStore("127.0.0.1", port, 2, is_master=False, timeout=timedelta(seconds=SECONDS))
        common = {**worker._common(tiny()), "rng_seed": 7, "torch": "2.0.0"}
        with pytest.raises(exchange.HandshakeError) as refusal:
            exchange.agree_on_group(store, 1, 2, common, SECONDS)
        return str(refusal.value)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(other_rank)
        place = {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        said = start(**place, ESPER_ARRIVAL_SECONDS=str(SECONDS))
        assert said == f"{APART}{other.result()}\n"
    assert "; rng_seed is 0 on rank 0 and 7 on rank 1 (" in said
    assert f"; torch is {torch.__version__} on rank 0 and 2.0.0 on rank 1 (" in said


def test_worker_ends_with_a_one_sentence_error_if_the_rendezvous_port_is_in_use(start: Refused) -> None:
    with socket.socket() as busy:
        busy.bind(("", 0))
        busy.listen()
        assert "EADDRINUSE" in start(MASTER_PORT=str(busy.getsockname()[1]))


@pytest.mark.parametrize("settings", [{"RANK": "first"}, {"MASTER_PORT": "harbour"}])
def test_worker_with_invalid_rendezvous_settings_ends_with_a_one_sentence_error(
    settings: dict[str, str], start: Refused
) -> None:
    assert start(**settings).startswith(APART)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--processes", "2", "--out", "run"), "say --nproc-per-node instead of --processes"),
        (("--rent", "0.01"), "name the run directory with --out"),
    ],
)
def test_train_command_under_torchrun_refuses_invalid_arguments(
    words: tuple[str, ...], said: str, start: Refused
) -> None:
    assert said in start(*words)


# --- restarts by torchrun ------------------------------------------------------------------------------


def test_restarted_worker_does_not_resume_a_run_of_another_command(
    worker: ModuleType, tmp_path: Path
) -> None:
    """If an existing run directory is refused, it is refused again after torchrun restarts the process."""
    store = HashStore()
    (tmp_path / "telemetry").mkdir()
    assert [worker._begun_before(store, tmp_path, False) for _ in range(2)] == [False, False]
    assert [worker._begun_before(store, tmp_path, True) for _ in range(2)] == [False, True]


def test_worker_restarted_after_the_run_has_finished_ends_without_an_error(
    undisturbed: Path, worker: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = HashStore()
    monkeypatch.setattr(worker, "_meet", lambda config: store)
    config = config_of_run(undisturbed)
    with pytest.raises(FinishedRunError):
        worker._take_part(config, undisturbed, True)
    worker._take_part(config, undisturbed, True)
