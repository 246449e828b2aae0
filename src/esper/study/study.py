"""Execution of a study from the study file to its tables; runs recorded in the journal are not repeated."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from esper.leyline import InterruptedRunError
from esper.run.run_config import checked, read_settings
from esper.study.one_run import RunResult, StudyRun, do_run
from esper.study.phases import StudyPhases
from esper.study.processes import in_processes
from esper.study.study_config import StudyConfig, check_study
from esper.study.study_journal import open_journal
from esper.study.study_results import write_results


def run_study(
    file: Path,
    out: Path,
    processes: int,
    say: Callable[[str], None],
    show: Callable[[str], None],
    data: Path | None = None,
) -> None:
    """Run the study that ``file`` describes, show its tables as Markdown and write them.

    A folder that cannot be written does not end the study (ADR 0044).

    Args:
        file: Study file (TOML or JSON).
        out: Folder of the study's journal and results; runs recorded in the journal are not repeated.
        processes: Number of processes that execute runs in parallel.
        say: Called with a line of text for each finished run.
        show: Called with the tables.
        data: File of the task ``text_scaling`` or folder of ``image_scaling``; that of ``file`` unless given.

    Raises:
        ConfigError: The study file is invalid.
        InterruptedRunError: Ctrl-C was pressed; the results of finished runs are kept.
        SaveError: The study is over, but results could not be written.
    """
    config = checked(StudyConfig, read_settings(file) | ({"data": data} if data else {}))
    check_study(config)
    with open_journal(out, file, config) as journal:

        def run_all(runs: Sequence[StudyRun]) -> Mapping[StudyRun, RunResult]:
            missing = [(config, run) for run in runs if run not in journal.lines]
            for number, line in enumerate(in_processes(do_run, missing, processes), start=1):
                journal.add(line)
                say(f"{number}/{len(missing)} {_said(line)}")
            return journal.lines

        try:
            found = {task: StudyPhases(config, task, run_all).run() for task in dict.fromkeys(config.tasks)}
        except KeyboardInterrupt:
            journal.write()
            raise InterruptedRunError(
                f"interrupted after {len(journal.lines)} runs, which are kept; to go on with the rest:"
                f" esper study {file} --out {out}"
            ) from None
        try:
            write_results(out, file.stem, config, found, show)
        finally:
            journal.write()


def _said(line: RunResult) -> str:
    run = line.run
    factors = " ".join(f"{factor:g}" for factor in run.factors)
    end = "diverged" if line.answers is None else f"validation loss {line.answers[-1].val_loss:.3f}"
    return f"{run.task} {run.what}, rate × {factors}, rng seed {run.rng_seed}: {end}"
