import os
from pathlib import Path

import pytest

from esper.karn.serve.folder import RunFolder, UnknownRunError
from esper.nissa.iteration_journal import IterationJournal
from esper.nissa.writer import RunWriter
from tests.karn import fake_run
from tests.karn.serving import lines_of, write_run


def names(folder: Path) -> list[str]:
    return [run.name for run in RunFolder(folder).runs().values()]


def version(folder: Path) -> str:
    (run,) = RunFolder(folder).runs().values()
    return run.version


def test_served_runs_are_named_by_relative_path_and_hidden_or_linked_folders_are_skipped(tmp_path):
    for place in ("mine", "runs/b", "runs/a/deep/er", "runs/.cache/old"):
        write_run(tmp_path / place, [])
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "mine")

    assert names(tmp_path / "mine") == ["mine"]
    assert names(tmp_path / "runs") == ["a/deep/er", "b"]


def test_server_finds_a_run_by_its_id_and_not_by_its_path(tmp_path):
    write_run(tmp_path / "mine", [])
    (run,) = RunFolder(tmp_path).runs().values()

    assert RunFolder(tmp_path).run(run.id).path == tmp_path / "mine"
    for id in ("mine", "../mine", "/", "", "0" * 12):
        with pytest.raises(UnknownRunError, match="there is no run"):
            RunFolder(tmp_path).run(id)


@pytest.mark.parametrize("linked", ["telemetry", "telemetry/rows-00000.jsonl"])
def test_run_whose_telemetry_folder_or_file_is_a_symlink_is_not_served(tmp_path, linked):
    outside = write_run(tmp_path / "outside")
    inside = write_run(tmp_path / "runs" / "mine")
    place = inside / linked
    place.rename(tmp_path / "aside")
    place.symlink_to(outside / linked)

    (run,) = RunFolder(tmp_path / "runs").runs().values()

    assert run.refusal == (
        f"'mine' is not read: its telemetry holds a link, '{place.name}', and links are not followed"
    )


def test_unreadable_run_does_not_affect_other_served_runs(tmp_path, monkeypatch):
    def fail(telemetry: Path) -> bool:
        if telemetry.parent.name == "locked":
            raise PermissionError(13, "Permission denied")
        return False

    write_run(tmp_path / "fine", [])
    write_run(tmp_path / "locked", [])
    monkeypatch.setattr("esper.karn.serve.folder.is_being_written", fail)

    refusals = {run.name: run.refusal for run in RunFolder(tmp_path).runs().values()}

    assert refusals == {"fine": None, "locked": "'locked' cannot be looked at: Permission denied"}


def test_version_of_a_served_run_changes_with_a_new_telemetry_row_or_a_replaced_file(tmp_path):
    run = write_run(tmp_path / "mine")
    first = version(tmp_path)
    assert version(tmp_path) == first
    with lines_of(run).open("a") as file:
        file.write("{}\n")
    second = version(tmp_path)
    os.utime(lines_of(run), (1, 1))

    assert len({first, second, version(tmp_path)}) == 3


def test_version_number_of_a_run_changes_when_its_writer_process_dies(tmp_path):
    writer = RunWriter(tmp_path / "mine")
    writer.emit(fake_run.run_row())
    writer.flush()
    alive = version(tmp_path)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}

    # Releasing the writer lock simulates a killed process, whose locks the kernel releases.
    writer._lock.release()

    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == files
    assert version(tmp_path) != alive


def test_journal_files_change_the_version_of_a_served_run_only_after_its_writer_died(tmp_path):
    """Journals must not change the version of a training in progress, or browsers would reload unchanged
    data.
    """
    with RunWriter(tmp_path / "mine"):
        journal = IterationJournal(tmp_path / "mine", "standard")
        alive = version(tmp_path)
        journal.take(1, 0, [fake_run.epoch_row(1)])
        assert version(tmp_path) == alive
    dead = version(tmp_path)
    # A worker process that outlives the writer process appends a row to the journal.
    journal.take(1, 0, [fake_run.epoch_row(2)])
    assert version(tmp_path) != dead


def test_running_run_with_a_symlink_among_its_journals_is_not_served(tmp_path):
    with RunWriter(tmp_path / "mine"):
        IterationJournal(tmp_path / "mine", "standard").take(1, 0, [fake_run.epoch_row(1)])
        (tmp_path / "mine" / "telemetry" / "unfinished-00001" / "link").symlink_to(tmp_path)
        (run,) = RunFolder(tmp_path).runs().values()
        assert "holds a link, 'link'" in (run.refusal or "")


@pytest.mark.parametrize(("took", "due"), [(0.0, 1.0), (2.0, 20.0)])
def test_server_lists_its_folder_at_most_once_a_second_and_for_at_most_a_tenth_of_the_time(
    tmp_path, took, due
):
    # Times that the fake clock returns: start and end of the first listing, a request shortly before a second
    # listing is allowed, and start and end of the second listing.
    ticks = iter([0.0, took, 0.95 * due, due, due])
    folder = RunFolder(tmp_path, clock=lambda: next(ticks))
    folder.runs()
    write_run(tmp_path / "mine", [])

    assert [len(folder.runs()), len(folder.runs())] == [0, 1]
