"""Run directory of ``esper.grow``: rows, views, and resuming after a kill."""

import os
import re
import signal
from io import StringIO
from pathlib import Path

import pytest
import torch
from msgspec.structs import asdict
from rich.console import Console

from esper import open_run
from esper.karn.log_lines import line_of, log
from esper.karn.report import render_report
from esper.karn.runs import as_json, listed
from esper.karn.screen import screen
from esper.leyline.errors import EsperError
from esper.leyline.rows import CounterfactualRow, DecisionRow, EpisodeRow, EpochRow, SeedRow, TransitionRow
from tests.growth.test_grow import PLAN, grow, network
from tests.integration.training import forked

KINDS = (EpochRow, SeedRow, TransitionRow, DecisionRow, CounterfactualRow, EpisodeRow)
TIMES = ("t", "ms", "phase_ms", "seconds")


def quiet(_line: str) -> None:
    pass


def show_and_die(line: str) -> None:
    """Kill the process before the checkpoint of epoch 3 is written."""
    if line.startswith("epoch 3:"):
        os.kill(os.getpid(), signal.SIGKILL)


def train_and_die(out: Path) -> None:
    torch.set_num_threads(1)
    grow(network(), epochs=5, controller=PLAN, show=show_and_die, out=out)


def rows_of(out: Path) -> list[dict[str, object]]:
    run = open_run(out)
    return [
        {name: value for name, value in asdict(row).items() if name not in TIMES}
        for kind in KINDS
        for row in run.rows(kind)
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Return a folder with two runs: ``whole``, and ``killed``, which was killed in epoch 3 and resumed."""
    folder = tmp_path_factory.mktemp("runs")
    grow(network(), epochs=5, controller=PLAN, show=quiet, out=folder / "whole")
    child = forked(train_and_die, folder / "killed")
    child.join()
    assert child.exitcode == -signal.SIGKILL
    run = open_run(folder / "killed")
    (folder / "killed.html").write_text(render_report(run), encoding="utf-8")
    assert (run.state, len(run.rows(EpochRow))) == ("stopped", 3)
    torch.manual_seed(99)
    grow(network(), epochs=5, controller=PLAN, show=quiet, out=folder / "killed", resume=True)
    return folder


def test_resumed_run_after_a_kill_has_every_epoch_once(runs):
    found = open_run(runs / "killed")

    assert [row.epoch for row in found.rows(EpochRow)] == [1, 2, 3, 4, 5]
    assert rows_of(runs / "killed") == rows_of(runs / "whole")
    assert found.state == "finished"
    times = [row.t for row in found.rows(EpochRow)]
    assert times == sorted(times)


def test_values_that_a_users_training_does_not_measure_are_null(runs):
    run = open_run(runs / "whole")
    (end,) = run.rows(EpisodeRow)

    assert (run.row.task, run.row.metric, run.row.horizon) == ("Sequential", "val_loss", 5)
    assert (run.row.rng_seed, run.row.data_hash) == (None, None)
    assert (end.val_score, end.test_score, end.twin_val_score, end.total_reward) == (None,) * 4
    assert {row.val_score for row in run.rows(EpochRow)} == {None}
    assert {row.gradient_health for row in run.rows(SeedRow)} == {None}
    assert end.host_flops_per_sample == 2 * (4 * 8 + 8 * 2)
    assert end.val_loss == run.rows(EpochRow)[-1].val_loss
    assert sum(end.op_counts) == len(run.rows(DecisionRow)) == 5


def test_contributions_equal_differences_of_counterfactual_losses(runs):
    run = open_run(runs / "whole")
    seed = run.rows(SeedRow)[-1]
    off, whole = run.rows(CounterfactualRow, "epoch = 5")
    slots = len(run.row.slots)

    assert (sum(whole.on), sum(off.on), len(whole.on)) == (1, 0, slots)
    assert off.loss - whole.loss == pytest.approx(seed.contribution)
    assert whole.loss == run.rows(EpochRow)[-1].val_loss


def test_watch_report_and_sql_show_the_loss(runs):
    run = open_run(runs / "whole")
    last, seed = run.rows(EpochRow)[-1], run.rows(SeedRow)[-1]
    loss, worth = f"{last.val_loss:.3g}", f"{seed.contribution:+.3g}"
    page = re.sub(r"\s+", " ", render_report(run))
    console = Console(width=140, record=True, file=StringIO())
    console.print(screen(run, 140))
    drawn = console.export_text()
    lines = [line_of(entry, run.row) for entry in log(run)]

    assert f"It reached a loss of {loss} on validation; no twin is known to compare with." in page
    assert f"mlp germinated in 0; contribution {worth}" in page
    assert "loss per 1,000 params" in page
    assert "no twin is known" in page
    assert "points" not in page.replace("points=", "")
    assert re.search(rf"loss +{loss} +best", drawn)
    assert worth in drawn
    assert any(line and f"validation {loss}" in line for line in lines)
    assert as_json(listed(runs / "whole")) | {"metric": "val_loss", "rng_seed": None} == as_json(
        listed(runs / "whole")
    )
    assert "After epoch 3 of 5 the loss is" in (runs / "killed.html").read_text(encoding="utf-8")


def test_runs_of_a_users_network_are_not_compared_by_unknown_scores(runs):
    page = render_report(open_run(runs / "whole"), [open_run(runs / "killed")])

    assert "episodes cannot be paired, since their data are unknown" in page


def test_run_with_a_flop_budget_shows_no_planned_number_of_epochs(tmp_path):
    # A minibatch costs 4,608 FLOPs and an epoch has 8 minibatches, so the budget lasts two and a half epochs.
    grow(network(), budget=20 * 4_608, controller=None, show=quiet, out=tmp_path / "run")
    run = open_run(tmp_path / "run")

    assert (run.row.horizon, run.state) == (None, "finished")
    assert [row.epoch for row in run.rows(EpochRow)] == [1, 2, 3]
    spent = {"forward": 20 * 1_536, "backward": 20 * 3_072, "validation": 18_432}
    assert {purpose: flops for purpose, flops in run.rows(EpisodeRow)[0].flops.items() if flops} == spent
    assert "Finished after epoch 3." in render_report(run)


def test_resume_with_other_settings_or_without_a_checkpoint_is_refused(runs, tmp_path):
    with pytest.raises(EsperError, match="was begun with epochs=5, and is to go on with 6"):
        grow(network(), epochs=6, controller=PLAN, show=quiet, out=runs / "whole", resume=True)
    assert open_run(runs / "whole").state == "finished"  # The refused resume removed no file.
    (tmp_path / "telemetry").mkdir()
    with pytest.raises(EsperError, match=r"holds no checkpoint\.pt to resume from; remove what is there"):
        grow(network(), epochs=5, out=tmp_path, resume=True)
