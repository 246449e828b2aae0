"""Recording of plans: regenerated bit for bit, continued after an interruption, refused when damaged."""

import shutil
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest
import torch

from esper.growbench.instances import DECISION_POINTS, FAMILIES, RNG_SEEDS, instance, plans_of
from esper.growbench.recording import record, regenerate
from esper.growbench.replay import load
from esper.growbench.store import PACKAGED, PlanRow, RecordingError, StepRow, columns_of, plan_of
from esper.leyline import EsperError
from esper.tolaria.tasks import task_named
from tests.growbench.conftest import PLANS, SMALL


def test_cell_is_regenerated_bit_for_bit_as_a_tree(recording: Path) -> None:
    count, differences = regenerate(recording, 1, RNG_SEEDS[1])
    assert differences == []
    # Step 0 is the untrained network.
    shared = {(tuple(s for s in plan if s < step), step) for plan in PLANS for step in range(41)}
    assert count == len(shared) + len(PLANS)


def test_single_plan_is_regenerated_bit_for_bit_without_its_tree(recording: Path) -> None:
    assert regenerate(recording, 0, RNG_SEEDS[0], (2, 5)) == (42, [])


def rewritten(folder: Path, kind: str, change: str) -> None:
    """Replace the rows of a file by those of the query ``change``, in which FILE is the file."""
    path = folder / kind / "000.parquet"
    new = path.with_suffix(".new")
    duckdb.sql(f"COPY ({change.replace('FILE', repr(str(path)))}) TO '{new}' (FORMAT parquet)")
    new.rename(path)


def test_one_changed_bit_is_reported_with_plan_step_and_column(recording: Path, tmp_path: Path) -> None:
    shutil.copytree(recording, tmp_path, dirs_exist_ok=True)
    changed = (
        "SELECT * REPLACE (CASE WHEN instance = 0 AND plan = '2' AND step = 7 THEN val_loss * (1 + 1e-15)"
        " ELSE val_loss END AS val_loss) FROM read_parquet(FILE)"
    )
    rewritten(tmp_path, "steps", changed)
    found = [line for seed in RNG_SEEDS for line in regenerate(tmp_path, 0, seed)[1]]
    assert len(found) == 2
    assert all(line.startswith("plan '2', step 7: val_loss was ") for line in found)


def test_interrupted_recording_continues_with_missing_cells_and_ends_equal(
    recording: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    record(tmp_path, SMALL[:1], plans=lambda number: PLANS, hours=0.0, notify=said.append)
    assert len(said) == 1, "no second cell is begun after the time is over"
    # A crash between the two files leaves steps without plans.
    done = "SELECT * FROM read_parquet(FILE) WHERE false"
    rewritten(tmp_path, "plans", done)
    record(tmp_path, SMALL, plans=lambda number: PLANS, notify=said.append)
    assert len(said) == 5
    record(tmp_path, SMALL, plans=lambda number: PLANS, notify=said.append)
    assert len(said) == 5, "everything is recorded"
    for kind in (StepRow, PlanRow):
        ours, theirs = columns_of(tmp_path, kind), columns_of(recording, kind)
        for name in set(kind.__struct_fields__) - {"cpu_seconds"}:
            assert ours[name].tobytes() == theirs[name].tobytes() or list(ours[name]) == list(theirs[name])


@pytest.mark.parametrize("kind", ["steps", "plans"])
def test_truncated_parquet_is_refused_by_name_and_left_alone(
    recording: Path, tmp_path: Path, kind: str
) -> None:
    shutil.copytree(recording, tmp_path, dirs_exist_ok=True)
    path = tmp_path / kind / "000.parquet"
    path.write_bytes(path.read_bytes()[:-200])
    before = path.read_bytes()
    with pytest.raises(RecordingError, match=rf"{kind}/000.parquet' is damaged .*; restore it, or delete it"):
        load(tmp_path)
    with pytest.raises(RecordingError, match="is damaged"):
        record(tmp_path, [instance(2)], plans=lambda number: [()])
    assert path.read_bytes() == before


def test_folder_without_a_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="has no recording; give the folder of one"):
        load(tmp_path)


def test_recording_of_another_torch_is_not_continued(recording: Path, tmp_path: Path) -> None:
    shutil.copytree(recording, tmp_path, dirs_exist_ok=True)
    rewritten(tmp_path, "plans", "SELECT * REPLACE ('torch 1.0' AS bits) FROM read_parquet(FILE)")
    for call in (
        lambda: regenerate(tmp_path, 0, RNG_SEEDS[0]),
        lambda: record(tmp_path, SMALL, plans=lambda number: PLANS),
    ):
        with pytest.raises(RecordingError, match=r"made with torch 1\.0, and this process computes with"):
            call()


@pytest.mark.parametrize(("number", "plan"), [(7, None), (0, (3,))])
def test_cell_or_plan_that_was_not_recorded_is_refused(
    recording: Path, number: int, plan: tuple[int, ...] | None
) -> None:
    with pytest.raises(RecordingError, match="was not recorded"):
        regenerate(recording, number, RNG_SEEDS[0], plan)


@pytest.mark.parametrize("text", ["x", "5;14", "-1", "5,,14"])
def test_text_that_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(RecordingError, match="write it as 5,14"):
        plan_of(text)


def test_instances_alternate_between_families_and_leave_held_out_tasks_alone() -> None:
    drawn = [instance(number) for number in range(120)]
    assert drawn == [instance(number) for number in range(120)]
    assert [one.family for one in drawn[:5]] == list(FAMILIES)
    assert not any(task_named(one.task).held_out for one in drawn)
    for name, family in FAMILIES.items():
        budgets = [one.budget for one in drawn if one.family == name and one.width == family.widths[-1]]
        assert family.budget / 32 <= min(budgets) < max(budgets) <= family.budget
        assert max(budgets) / min(budgets) > 6
    with pytest.raises(EsperError, match="count from 0"):
        instance(-1)


def test_every_instance_has_21_different_plans_in_the_decision_points() -> None:
    for number in range(120):
        plans = plans_of(number)
        assert len(set(plans)) == len(plans) == 21
        assert {(), *((step,) for step in DECISION_POINTS)} < set(plans)
        assert all(plan == tuple(sorted(set(plan))) for plan in plans)
        assert all(len(plan) <= 4 and set(plan) <= set(DECISION_POINTS) for plan in plans)


def test_packaged_plan_is_regenerated_bit_for_bit() -> None:
    rows = columns_of(PACKAGED, PlanRow)
    cheapest = int(rows["cpu_seconds"].argmin())
    if f"torch {torch.__version__};" not in rows["bits"][cheapest]:
        pytest.skip(f"recorded with {rows['bits'][cheapest]}; this is torch {torch.__version__}")
    names = {"--instance": "instance", "--rng-seed": "rng_seed", "--plan": "plan"}
    flags = [word for flag, name in names.items() for word in (flag, str(rows[name][cheapest]))]
    # The command selects kernels by variables that torch reads when it starts, so it needs a new process.
    command = [
        sys.executable,
        "-c",
        "from esper.scripts.cli import main; main()",
        "growbench",
        "check",
        *flags,
    ]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert "rows of instance" in found.stdout
    assert "are equal to the last bit" in found.stdout
