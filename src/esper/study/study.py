"""Execution of a study from its file to its tables; finished runs are not repeated."""

from collections.abc import Callable, Sequence
from pathlib import Path

from esper.leyline.errors import InterruptedRunError
from esper.run.run_config import checked, read_settings
from esper.study.one_run import RunResult, StudyRun, do_run
from esper.study.phases import StudyPhases
from esper.study.processes import in_processes
from esper.study.study_config import StudyConfig, check_study
from esper.study.study_journal import open_journal
from esper.study.study_results import write_results


def run_study(file: Path, out: Path, processes: int, say: Callable[[str], None]) -> str:
    """Run the study in ``file`` and return its tables as Markdown.

    Args:
        file: Study file (TOML or JSON).
        out: Folder of journal and results; runs recorded there are not repeated.
        processes: Processes that share the runs.
        say: Called with a line of text for each finished run.

    Raises:
        ConfigError: The study file is invalid.
        InterruptedRunError: Ctrl-C was pressed; finished runs are kept.
    """
    config = checked(StudyConfig, read_settings(file))
    check_study(config)
    with open_journal(out, file, config) as journal:

        def run_all(runs: Sequence[StudyRun]) -> list[RunResult]:
            missing = [(config, run) for run in dict.fromkeys(runs) if run not in journal.lines]
            for number, line in enumerate(in_processes(do_run, missing, processes), start=1):
                journal.add(line)
                say(f"{number}/{len(missing)} {_said(line)}")
            return [journal.lines[run] for run in runs]

        try:
            found = {task: StudyPhases(config, task, run_all).run() for task in dict.fromkeys(config.tasks)}
        except KeyboardInterrupt:
            raise InterruptedRunError(
                f"interrupted after {len(journal.lines)} runs, which are kept; to go on with the rest:"
                f" esper study {file} --out {out}"
            ) from None
        return write_results(out, file.stem, config, found)


def _said(line: RunResult) -> str:
    run = line.run
    factors = " ".join(f"{factor:g}" for factor in run.factors)
    end = "diverged" if line.answers is None else f"validation loss {line.answers[-1].val_loss:.3f}"
    return f"{run.task} {run.what}, rate × {factors}, rng seed {run.rng_seed}: {end}"
