"""Run directory of ``esper.grow``: telemetry rows, report, terminal view, and resuming after a kill."""

import os
import re
import shutil
import signal
from io import StringIO
from pathlib import Path

import pytest
import torch
from msgspec.structs import asdict
from rich.console import Console

from esper import open_run
from esper.karn.log_lines import line_of, log
from esper.karn.page.sections import render_report
from esper.karn.runs import as_json, listed
from esper.karn.screen import screen
from esper.leyline.errors import EsperError, GrowthWarning
from esper.leyline.rows import CounterfactualRow, DecisionRow, EpisodeRow, EpochRow, SeedRow, TransitionRow
from tests.growth import test_grow
from tests.growth.test_grow import PLAN, grow, network
from tests.integration.training import everything_in, forked, full_disk

KINDS = (EpochRow, SeedRow, TransitionRow, DecisionRow, CounterfactualRow, EpisodeRow)
TIMES = ("t", "ms", "phase_ms", "seconds")


def quiet(_line: str) -> None:
    pass


def show_and_die(line: str) -> None:
    """Kill this process when epoch 3 is printed, before the checkpoint of epoch 3 is written."""
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


def test_run_of_grow_resumed_after_a_kill_has_the_telemetry_rows_of_an_uninterrupted_run(runs):
    found = open_run(runs / "killed")

    assert [row.epoch for row in found.rows(EpochRow)] == [1, 2, 3, 4, 5]
    assert rows_of(runs / "killed") == rows_of(runs / "whole")
    assert found.state == "finished"
    times = [row.t for row in found.rows(EpochRow)]
    assert times == sorted(times)


def test_telemetry_columns_that_grow_does_not_measure_are_null(runs):
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


def test_contribution_of_a_seed_row_equals_the_difference_of_counterfactual_losses(runs):
    run = open_run(runs / "whole")
    seed = run.rows(SeedRow)[-1]
    off, whole = run.rows(CounterfactualRow, "epoch = 5")
    slots = len(run.row.slots)

    assert (sum(whole.on), sum(off.on), len(whole.on)) == (1, 0, slots)
    assert off.loss - whole.loss == pytest.approx(seed.contribution)
    assert whole.loss == run.rows(EpochRow)[-1].val_loss


def test_terminal_report_and_list_of_runs_show_the_loss_of_a_run_of_grow(runs):
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


def test_report_does_not_pair_episodes_of_two_runs_of_grow_because_their_data_are_unknown(runs):
    page = render_report(open_run(runs / "whole"), [open_run(runs / "killed")])

    assert "episodes cannot be paired, since their data are unknown" in page


def test_run_of_grow_with_a_flop_budget_has_no_planned_number_of_epochs(tmp_path):
    # A minibatch costs 4,608 FLOPs and an epoch has 8 minibatches, so 20 minibatches are two and a half
    # epochs.
    grow(network(), budget=20 * 4_608, controller=None, show=quiet, out=tmp_path / "run")
    run = open_run(tmp_path / "run")

    assert (run.row.horizon, run.state) == (None, "finished")
    assert [row.epoch for row in run.rows(EpochRow)] == [1, 2, 3]
    spent = {"forward": 20 * 1_536, "backward": 20 * 3_072, "validation": 18_432}
    assert {purpose: flops for purpose, flops in run.rows(EpisodeRow)[0].flops.items() if flops} == spent
    assert "Finished after epoch 3." in render_report(run)


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty"])
def test_grow_refuses_to_resume_from_a_damaged_checkpoint_and_changes_no_file(runs, tmp_path, damage):
    out = tmp_path / "run"
    shutil.copytree(runs / "whole", out)
    content = bytearray((out / "checkpoint.pt").read_bytes())
    content[len(content) // 2] ^= 1
    kept = {"flipped": len(content), "cut": len(content) // 2, "empty": 0}[damage]
    (out / "checkpoint.pt").write_bytes(content[:kept])
    before = everything_in(out)

    with pytest.raises(EsperError, match=r"checkpoint\.pt' is damaged or was not written by this version"):
        grow(network(), epochs=5, controller=PLAN, show=quiet, out=out, resume=True)
    assert everything_in(out) == before


def test_grow_whose_directory_cannot_be_written_returns_the_network_with_a_warning(tmp_path, monkeypatch):
    whole = grow(network(), epochs=3, controller=PLAN, show=quiet)
    lines: list[str] = []
    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.warns(GrowthWarning, match=r"not complete on disk: .*No space left on device") as warned:
        grown = grow(network(), epochs=3, controller=PLAN, show=lines.append, out=tmp_path / "run")

    assert grown.unsaved == str(warned[0].message)
    assert (warned[0].filename, len(lines)) == (test_grow.__file__, 3)
    for ours, theirs in zip(grown.net.parameters(), whole.net.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_grow_trains_on_with_a_warning_if_its_lines_cannot_be_printed():
    with pytest.warns(
        GrowthWarning, match="cannot be shown: No space left on device; the training continues"
    ):
        grown = grow(network(), epochs=2, controller=None, show=full_disk)
    assert len(grown.epochs) == 3


def test_grow_refuses_to_resume_with_other_settings_or_without_a_checkpoint(runs, tmp_path):
    with pytest.raises(EsperError, match="was begun with epochs=5, and is to go on with 6"):
        grow(network(), epochs=6, controller=PLAN, show=quiet, out=runs / "whole", resume=True)
    assert open_run(runs / "whole").state == "finished"  # The refused resume has removed no file of the run.
    (tmp_path / "telemetry").mkdir()
    with pytest.raises(EsperError, match=r"holds no checkpoint\.pt to resume from; remove what is there"):
        grow(network(), epochs=5, out=tmp_path, resume=True)
