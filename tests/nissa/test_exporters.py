import math
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
from msgspec.structs import replace
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from esper.leyline.columns import COLUMNS, LISTS, TABLE_OF
from esper.leyline.rows import EpisodeRow, EpochRow, Row, RunRow, UpdateRow
from esper.nissa.exporters.points import STEP_COLUMNS, ExportError, Points, exported_types, points_of
from esper.nissa.exporters.tensorboard import TensorBoardExporter
from esper.nissa.exporters.trackers import trackio_exporter, wandb_exporter
from tests.karn import fake_run
from tests.nissa.event_files import points_expected, points_in

RUN = fake_run.run_row()
TRAINING = fake_run.run_row(iterations=3)
THIRD_ATTEMPT = replace(fake_run.episode_row(1), attempt=2, iteration=2)
"""Episode row of iteration 2, of an episode whose first two attempts failed."""


def training_rows() -> list[Row]:
    """Return the telemetry rows of three training iterations; several metrics of the second iteration are
    unknown."""
    unknown = replace(
        fake_run.update_row(2),
        mean_return=None,
        reward_terms={"lead": None, "rent": -0.5},
        head_entropy=[None] * 8,
        explosion=None,
        evaluation_return=1e-8,
    )
    return [
        TRAINING,
        fake_run.update_row(1),
        fake_run.episode_row(0),
        unknown,
        replace(fake_run.episode_row(1), total_reward=0.1, reward_terms={"lead": 0.3, "rent": None}),
        replace(THIRD_ATTEMPT, twin_val_score=None),
        replace(fake_run.episode_row(1), env=1),
        fake_run.update_row(3),
    ]


def two_episodes() -> list[Row]:
    run = fake_run.run_row(episodes=2)
    return [run, *fake_run.episode(0), *fake_run.episode(1)]


def export(rows: list[Row], out: Path) -> list[Row]:
    """Export rows, written 0.1234 s apart, for TensorBoard; return the exported rows."""
    run, *others = rows
    assert isinstance(run, RunRow)
    timed = [replace(row, t=0.1234 * number) for number, row in enumerate(others)]
    exported = [row for row in timed if isinstance(row, exported_types(run))]
    exporter = TensorBoardExporter(run, out)
    for row in exported:
        exporter.take(points_of(row, run))
    exporter.close()
    return exported


# --- rows as points ---------------------------------------------------------------------------------


def test_every_list_column_has_export_names_and_epoch_rows_of_a_policy_training_are_not_exported() -> None:
    """Exporters would silently omit a list column without an entry in ``LISTS``."""
    assert exported_types(RUN) == (EpochRow, EpisodeRow)
    assert exported_types(TRAINING) == (UpdateRow, EpisodeRow)
    lists = {
        column.name
        for row_type in STEP_COLUMNS
        for column in COLUMNS[TABLE_OF[row_type]]
        if column.sql_type in ("BIGINT[]", "DOUBLE[]")
    }

    assert lists <= set(LISTS)


def test_exporting_a_list_column_of_wrong_length_is_refused() -> None:
    with pytest.raises(ExportError, match="'op_shares' holds 2 entries where the run names 6 ops"):
        points_of(replace(fake_run.update_row(1), op_shares=[0.5, 0.5]), TRAINING)


# --- event files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [training_rows(), two_episodes()], ids=["training", "run"])
def test_tensorboard_event_file_contains_exactly_the_numbers_of_all_exported_rows(
    rows: list[Row], tmp_path: Path
) -> None:
    """TensorBoard must show all points, although the tables have different step axes."""
    exported = export(rows, tmp_path / "out")

    found = points_in(tmp_path / "out")
    assert len(found) > 150
    assert found == points_expected(rows[0], exported)
    shown = EventAccumulator(str(tmp_path / "out"), size_guidance={"scalars": 0}).Reload()
    assert sum(len(shown.Scalars(tag)) for tag in shown.Tags()["scalars"]) == len(found)


def test_configuration_and_provenance_are_exported_as_tensorboard_texts(tmp_path: Path) -> None:
    run = replace(RUN, config={"task": "a|b\nc", "steps": None, "inner": {"rate": 0.5}})

    TensorBoardExporter(run, tmp_path / "out").close()

    shown = EventAccumulator(str(tmp_path / "out")).Reload()
    (event,) = shown.Tensors("run/configuration")
    lines = ["| name | value |", "|---|---|", r"| task | a\|b c |", "| steps | – |", "| inner.rate | 0.5 |"]
    assert event.tensor_proto.string_val[0].decode() == "\n".join(lines)
    assert shown.SummaryMetadata("run/provenance").plugin_data.plugin_name == "text"
    assert (
        "| versions.python | 3.11 |" in shown.Tensors("run/provenance")[0].tensor_proto.string_val[0].decode()
    )


@pytest.mark.parametrize(("number", "stored"), [(1e39, math.inf), (-1e39, -math.inf)])
def test_number_beyond_the_range_of_float32_is_exported_to_tensorboard_as_infinity(
    number: float, stored: float, tmp_path: Path
) -> None:
    exporter = TensorBoardExporter(TRAINING, tmp_path / "out")
    exporter.take(Points("update", "iteration", 2**33, 0.0, {"a": number}))
    exporter.close()

    (point,) = points_in(tmp_path / "out")
    assert (point.step, point.value) == (2**33, stored)


# --- export folders ---------------------------------------------------------------------------------


def test_tensorboard_exporter_refuses_a_non_empty_folder_and_its_flushed_points_are_readable(
    tmp_path: Path,
) -> None:
    exporter = TensorBoardExporter(TRAINING, tmp_path / "out")
    exporter.take(points_of(fake_run.update_row(1), TRAINING))
    exporter.flush()
    before = [path.read_bytes() for path in (tmp_path / "out").iterdir()]

    assert {point.step for point in points_in(tmp_path / "out")} == {1}
    with pytest.raises(ExportError, match=r"out' is not empty; .* choose another with --out"):
        TensorBoardExporter(RUN, tmp_path / "out")
    assert [path.read_bytes() for path in (tmp_path / "out").iterdir()] == before
    exporter.close()


def test_error_for_an_export_folder_that_cannot_be_created_names_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(ExportError, match="file/out' cannot be written: Not a directory"):
        TensorBoardExporter(RUN, tmp_path / "file" / "out")


def begin_tensorboard(run: RunRow, out: Path, project: str) -> TensorBoardExporter:
    return TensorBoardExporter(run, out)


@pytest.mark.parametrize(
    ("begin", "name"),
    [(begin_tensorboard, "tensorboard"), (trackio_exporter, "trackio"), (wandb_exporter, "wandb")],
)
def test_error_for_a_missing_package_of_an_export_names_the_install_command(
    begin, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setenv("TRACKIO_DIR", "elsewhere")

    with pytest.raises(ExportError, match=f"'{name}' is not installed; .* pip install {name}$"):
        begin(RUN, tmp_path / "out", "esper")
    assert not (tmp_path / "out").exists()


class ForgetfulTrackio:
    """Stub of the package Trackio that can warn about points it does not store."""

    def __init__(self, *, forgets: bool) -> None:
        self.forgets = forgets
        self.logged: list[tuple[dict[str, float], int]] = []

    def Api(self) -> "ForgetfulTrackio":  # noqa: N802  the tracker's name for it
        return self

    def runs(self, project: str) -> list[object]:
        raise ValueError(f"Project '{project}' does not exist")

    def init(self, **settings: object) -> None:
        self.settings = settings

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((values, step))

    def finish(self) -> None:
        if self.forgets:
            warnings.warn("the disk is full", stacklevel=2)


@pytest.mark.parametrize("forgets", [False, True])
def test_trackio_exporter_logs_all_values_and_turns_warnings_of_trackio_into_errors(
    forgets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = ForgetfulTrackio(forgets=forgets)
    monkeypatch.setitem(sys.modules, "trackio", tracker)
    points = points_of(replace(fake_run.update_row(2), t=7.5), TRAINING)

    exporter = trackio_exporter(TRAINING, None, "growth")
    exporter.take(points)
    lost = pytest.raises(ExportError, match="did not keep everything: the disk is full")
    with lost if forgets else nullcontext():
        exporter.close()

    assert tracker.logged == [({"update/iteration": 2, "update/t": 7.5, **points.values}, 2)]
    assert (tracker.settings["project"], tracker.settings["name"]) == ("growth", "demo")
    assert tracker.settings["config"]["iterations"] == 3
