"""Tiny commands of each kind, with the conditions that must hold after each injected fault."""

import re
import shutil
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file

import esper
from esper.files.atomic_write import SaveError
from esper.karn.run import open_run
from esper.leyline.errors import EsperError, GrowthWarning
from esper.leyline.rows import TABLES
from esper.nissa.alert_rules import MACHINE_RULES
from esper.run.arm import run_arm
from esper.run.checkpoint_file import CHECKPOINT
from esper.run.policy_training import train
from esper.run.run_config import RunConfig
from esper.run.train_checkpoint import FinishedRunError, config_of_run
from esper.scripts import cli
from esper.study.study import run_study
from esper.tolaria.tasks import TASKS
from tests.faults.faults import Command
from tests.growth.test_grow import grow, network
from tests.integration.training import TIMES, checkpoint_in, files_below, tiny
from tests.study import building

RUN, OUT = Path("run"), Path("out")
RULES = {*MACHINE_RULES, "compaction"}
"""Alerts that a fault may add to the rows of a run."""


def rows_of(run: Path) -> dict[str, list[dict[str, Any]]]:
    """Return all rows except those of table ``resource``, time columns and alerts about the machine."""
    opened = open_run(run)
    return {
        table: [
            {name: value for name, value in msgspec.to_builtins(row).items() if name not in TIMES}
            for row in opened.rows(kind)
            if getattr(row, "rule", None) not in RULES
        ]
        for table, kind in TABLES.items()
        if table != "resource"
    }


# --- train ----------------------------------------------------------------------------------------


def begin_training() -> None:
    train(tiny(iterations=2, envs=1, hidden_dim=8, update_epochs=1), RUN)


def resume_training() -> None:
    """Resume the training, or start it again if the fault came before its configuration was written."""
    try:
        config = config_of_run(RUN)
    except EsperError:
        assert not (RUN / CHECKPOINT).exists()
        shutil.rmtree(RUN, ignore_errors=True)
        begin_training()
        return
    with suppress(FinishedRunError):
        train(config, RUN, resume=True)


def check_training(whole: Path) -> None:
    """Compare rows, best policy and checkpoint."""
    assert rows_of(whole / RUN) == rows_of(RUN)
    assert checkpoint_in(whole / RUN) == checkpoint_in(RUN)
    assert files_below(whole / RUN / "best") == files_below(RUN / "best")


# --- grow -----------------------------------------------------------------------------------------


def begin_growth(*, resume: bool = False) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GrowthWarning)  # Attribute ``unsaved`` has the same text.
        grown = grow(network(), epochs=2, controller="mlp@0:1", show=lambda _: None, out=RUN, resume=resume)
    grown.save(OUT)
    if grown.unsaved is not None:
        raise SaveError(grown.unsaved)


def resume_growth() -> None:
    if (RUN / "checkpoint.pt").exists():
        begin_growth(resume=True)
    else:
        shutil.rmtree(RUN, ignore_errors=True)
        begin_growth()


def check_growth(whole: Path) -> None:
    assert rows_of(whole / RUN) == rows_of(RUN)
    assert weights_equal(load_file(OUT), load_file(whole / OUT))


def weights_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# --- run ------------------------------------------------------------------------------------------


def begin_run() -> None:
    run_arm(RunConfig(task="tiny", steps=2), "off", RUN)


def check_run(whole: Path) -> None:
    assert rows_of(whole / RUN) == rows_of(RUN)
    name = "model/episode-0.safetensors"
    ours, theirs = esper.load(RUN / name), esper.load(whole / RUN / name)
    assert weights_equal(ours.state_dict(), theirs.state_dict())


def read_run() -> None:
    """Read the epoch rows, if a run row was written, then delete the run and run the command again."""
    with suppress(EsperError):
        open_run(RUN).rows(TABLES["epoch"])
    shutil.rmtree(RUN, ignore_errors=True)
    begin_run()


# --- study, report, export, saved network -----------------------------------------------------------


def begin_study() -> None:
    run_study(Path("study.toml"), OUT, 1, lambda _: None, lambda _: None)


def write_study_file() -> None:
    runs = 'tasks = ["tiny_scaling"]\narms = ["static:1"]\nbudget = "120M"\nsteps = 4\nmarks = [1.0]\n'
    seeds = "rng_seeds = 1\nselection_rng_seeds = 0\nlearning_rate_factors = [1.0]\n"
    Path("study.toml").write_text(runs + seeds)


def untimed(path: Path) -> str:
    """Return the text of a result file without its CPU times."""
    return re.sub(r"[0-9.]+ s\b", "", path.read_text())


def check_study(whole: Path) -> None:
    for name in ("table.md", "study.html"):
        assert untimed(OUT / name) == untimed(whole / OUT / name)
    assert (OUT / "answers.parquet").stat().st_size == (whole / OUT / "answers.parquet").stat().st_size


def begin_report() -> None:
    cli.main(["report", str(RUN)])


def write_old_report() -> None:
    begin_run()
    begin_report()
    page = RUN / "report.html"
    page.write_text(page.read_text() + "<!-- old -->")


def read_report() -> None:
    """Check that the report file is the old or the new report, then write the report again."""
    page = (RUN / "report.html").read_text()
    assert page.endswith(("</html>\n", "</html>", "<!-- old -->")), page[-100:]
    begin_report()


def check_report(whole: Path) -> None:
    assert (RUN / "report.html").read_bytes() == (whole / RUN / "report.html").read_bytes()


def begin_export() -> None:
    cli.main(["export", str(RUN), "--out", str(OUT)])


def export_again() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    begin_export()


def check_export(whole: Path) -> None:
    (ours,), (theirs,) = OUT.iterdir(), (whole / OUT).iterdir()
    assert ours.read_bytes() == theirs.read_bytes()


def save_network(**settings: Any) -> None:
    torch.manual_seed(0)
    grow(network(), epochs=2, show=lambda _: None, **settings).save(OUT)


def load_and_save() -> None:
    esper.load(OUT, base=network())
    save_network(controller="mlp@0:1")


def check_network(whole: Path) -> None:
    ours, theirs = (esper.load(path, base=network()) for path in (OUT, whole / OUT))
    assert weights_equal(ours.state_dict(), theirs.state_dict())


def nothing() -> None:
    """Do nothing: the command needs no files."""


COMMANDS: dict[str, Command] = {
    "train": Command(nothing, begin_training, resume_training, check_training),
    "grow": Command(nothing, begin_growth, resume_growth, check_growth),
    "run": Command(nothing, begin_run, read_run, check_run),
    "study": Command(write_study_file, begin_study, begin_study, check_study),
    "report": Command(write_old_report, begin_report, read_report, check_report),
    "export": Command(begin_run, begin_export, export_again, check_export),
    "save": Command(
        lambda: save_network(controller=None),
        lambda: save_network(controller="mlp@0:1"),
        load_and_save,
        check_network,
    ),
}


def register_tasks(set_item: Callable[..., None]) -> None:
    """Register the small task of studies; ``prepare`` registers the task of the other commands."""
    set_item(TASKS, building.NAME, building.TASK)
