"""Terminal view of runs: printed lines, full screen, and the share of time spent on refreshing."""

import io
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segment

from esper.karn import terminal
from esper.karn.log_lines import LogEntry, line_of
from esper.karn.palette import LOOKS, SEVERITIES
from esper.karn.run import open_run
from esper.karn.screen import screen
from esper.karn.terminal import TerminalView
from esper.leyline.rows import AlertRow, EpochRow, Row
from esper.leyline.stages import Stage
from esper.nissa.writer import RunWriter
from tests.karn import fake_run, fake_training, made_run

LOG = """\
run demo: task digits_impaired, controller heuristic, rng seed 0, host of 250 parameters, slots r0c0 r0c1 r0c2
stages: . dormant, G germinated, T training, B blending, H holding, F fossilized, E embargoed, R resetting
epoch 0/8  loss      –  score  10.0  twin  10.0  params 250 ×1.00  slots ...
after epoch 0: r0c0 conv_light germinated
epoch 1/8  loss  2.500  score  14.0  twin  12.0  params 398 ×1.59  slots T..
after epoch 1: r0c1 conv_heavy germinated: plateau
after epoch 2: r0c0 conv_light blending: incubation is over
epoch 2/8  loss  1.250  score  22.5  twin  14.0  params 1,598 ×6.39  slots BT.
epoch 3/8  loss  0.833  score  30.0  twin  16.5  params 1,598 ×6.39  slots BT.
after epoch 4: r0c0 conv_light holding: full alpha reached
after epoch 4: r0c1 conv_heavy blending: incubation is over
epoch 4/8  loss  0.625  score  41.0  twin  18.0  params 1,598 ×6.39  slots HB.
after epoch 5: r0c1 conv_heavy pruned by the governor: non-finite loss
epoch 5/8  loss  0.500  score  47.5  twin  19.5  params 398 ×1.59  slots HE.
after epoch 5: r0c0 conv_light fossilized
epoch 6/8  loss  0.417  score  58.0  twin  21.0  params 398 ×1.59  slots FE.
after epoch 6: r0c2 norm germinated
epoch 7/8  loss  0.357  score  64.1  twin  22.0  params 438 ×1.75  slots FRT
epoch 8/8  loss  0.312  score  62.0  twin  22.0  params 438 ×1.75  slots F.T
after epoch 8: r0c2 norm pruned: horizon
episode 0 ended (horizon) after 0:00:12: validation 61.5, test 60.2, twin 22.0, params 398 ×1.59
"""
TRAINING_LOG = """\
iteration 1/100  left –  return +0.02  score 22.0  twin 16.5  params 410  kl 0.005  ev +0.90  entropy 1.50\
  wait 50 % germ 25 % prune 12 % foss 12 %
iteration 2/100  left 0:20:25  return +0.04  score 22.5  twin 16.5  params 420  kl 0.006  ev +0.89\
  entropy 1.50  wait 50 % germ 25 % prune 12 % foss 12 %
warning kl raised in iteration 2 (policy): found 0.0812, limit 0.06; Lower learning_rate.
warning kl cleared in iteration 3 (policy): found 0.01, limit 0.06
"""


write = partial(made_run.write, tick=0.125)


def a_run(episodes: int = 1) -> Iterator[Row]:
    yield fake_run.run_row(episodes=episodes)
    for number in range(episodes):
        yield from fake_run.episode(number)


def shown(directory: Path, console: Console, **settings: bool) -> None:
    with TerminalView(directory, console, **settings) as view:
        view.refresh()


def logged(directory: Path, rows: Iterable[Row]) -> list[str]:
    file = io.StringIO()
    shown(write(directory, rows), Console(file=file, width=40))
    return file.getvalue().splitlines()


# --- plain lines ------------------------------------------------------------------------------------


def test_terminal_view_without_a_terminal_prints_a_line_per_epoch_and_per_stage_change(
    tmp_path: Path,
) -> None:
    assert logged(tmp_path / "run", a_run()) == LOG.splitlines()


def test_terminal_view_on_a_dumb_or_ascii_terminal_prints_plain_lines(tmp_path: Path) -> None:
    write(tmp_path / "run", a_run())
    dumb, raw = io.StringIO(), io.BytesIO()
    shown(tmp_path / "run", Console(file=dumb, force_terminal=True, _environ={"TERM": "dumb"}))
    ascii_file = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    shown(tmp_path / "run", Console(file=ascii_file, force_terminal=True))

    assert dumb.getvalue() == LOG
    assert b"params 398 ?1.59  slots T..\n" in raw.getvalue()


def test_printed_epoch_line_names_every_episode_but_the_first_and_has_a_dash_for_an_unknown_twin_score(
    tmp_path: Path,
) -> None:
    bare = replace(fake_run.epoch_row(1, episode=2), twin_score=None)
    lines = logged(tmp_path / "run", chain(a_run(2), [bare]))

    assert lines[:21] == LOG.splitlines()
    assert lines[22] == "episode 1  after epoch 0: r0c0 conv_light germinated"
    assert lines[-1] == (
        "episode 2  epoch 1/8  loss  2.500  score  14.0  twin     –  params 398 ×1.59  slots ..."
    )


@pytest.mark.parametrize("share", [1e-6, 1e6], ids=["tiny-share", "large-share"])
def test_terminal_view_prints_every_line_of_a_run_in_progress_once(share: float, tmp_path: Path) -> None:
    """With a tiny share of time for refreshing, the view reads the run twice: at the start and at the end."""
    file, writer = io.StringIO(), RunWriter(tmp_path / "run")
    after_first: list[str] = []
    with TerminalView(tmp_path / "run", Console(file=file), share_of_time=share) as view:
        for row in a_run():
            writer.emit(row)
            if isinstance(row, EpochRow):
                writer.flush()
                view.refresh()
                after_first.append(file.getvalue())
        writer.close()

    assert file.getvalue() == LOG
    assert after_first[0].endswith("params 250 ×1.00  slots ...\n")
    assert (after_first[0] == after_first[-1]) == (share == 1e-6)


def governor_alert(value: float | None, limit: float | None) -> AlertRow:
    row = replace(fake_run.alert_row(), scope="environment 0", hint="the governor rolled back")
    return replace(row, severity="error", value=value, limit=limit, episode=1, epoch=7)


def test_terminal_view_prints_an_alert_as_one_line(tmp_path: Path) -> None:
    rows = [fake_run.run_row(), governor_alert(2.314, 2.2561), governor_alert(None, None)]
    start = "error collapse raised in episode 1, epoch 7 (environment 0): found"
    assert logged(tmp_path / "run", rows)[2:] == [
        f"{start} 2.31, limit 2.26; the governor rolled back",
        f"{start} –; the governor rolled back",
    ]


def two_iterations() -> Iterator[Row]:
    yield fake_training.run_row()
    yield from fake_training.iteration_rows(1)
    yield from fake_training.iteration_rows(2)
    yield fake_training.alert_row("kl", 2)
    yield fake_training.alert_row("kl", 3, "cleared", value=0.01)


def test_terminal_view_prints_one_line_per_training_iteration_and_one_per_alert(tmp_path: Path) -> None:
    """Show a training in progress, with 98 iterations of 12.5 s each left."""
    file = io.StringIO()
    with RunWriter(tmp_path / "run") as writer:
        for row in two_iterations():
            writer.emit(row)
        writer.flush()
        shown(tmp_path / "run", Console(file=file))

    assert file.getvalue() == TRAINING_LOG


def test_printed_iteration_line_shows_evaluation_and_skipped_update_and_dashes_for_unknown_values(
    tmp_path: Path,
) -> None:
    unknown = dict.fromkeys(("mean_return", "val_score", "params", "explained_variance", "entropy"))
    why = "reward of environment 1 at step 2 is nan"
    row = replace(fake_training.update_row(10), skipped=why, **unknown)
    (line,) = logged(tmp_path / "run", [fake_training.run_row(), row])

    assert "  | argmax return +0.30, score 35.0  | update left out: reward of environment 1 at" in line
    assert "return –  score –  twin –  params –" in line
    assert "ev –  entropy –" in line


def test_terminal_view_of_a_resumed_training_does_not_print_earlier_iterations_again(tmp_path: Path) -> None:
    write(tmp_path / "run", fake_training.course(2))
    file = io.StringIO()
    shown(tmp_path / "run", Console(file=file), skip_past=True)

    assert file.getvalue() == ""


# --- nothing to show --------------------------------------------------------------------------------


@pytest.mark.parametrize("is_terminal", [False, True])
def test_terminal_view_does_not_show_an_earlier_run_in_the_directory(
    is_terminal: bool, tmp_path: Path
) -> None:
    """Close the view before ``TerminalView.refresh`` is called, as happens if a run directory is refused."""
    write(tmp_path / "run", a_run())
    file = io.StringIO()
    console = Console(file=file, force_terminal=is_terminal, color_system=None, width=80, height=24)
    with pytest.raises(KeyboardInterrupt), TerminalView(tmp_path / "run", console):
        raise KeyboardInterrupt

    assert "digits" not in file.getvalue()
    assert not is_terminal or file.getvalue().endswith("\x1b[?25h"), "the cursor comes back"


def test_unreadable_telemetry_ends_the_terminal_view_and_not_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "run", a_run())
    for rows in (tmp_path / "run" / "telemetry").glob("rows-*.jsonl"):
        rows.write_bytes(b"{}\n")
    with TerminalView(tmp_path / "run", Console(file=io.StringIO())) as view:
        view.refresh()

    assert capsys.readouterr().err.count("esper: the run is no longer shown: ") == 1
    assert view.error is not None


# --- screen -----------------------------------------------------------------------------------------

RUN_SCREEN = """\
digits_impaired · heuristic · finished · epoch 8/8 · 0:00:12 · 0.653 steps/s
━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━
score   61.5  best 64.1             ▁▂▃▄▅▆▇██
twin    22.0  lead +39.5            ▁▁▂▂▂▂▂▃▃
params   398  ×1.59 the host's 250
alerts  ▲ collapse  slot r0c1  found 2.5, limit 2.25  epoch 4  rolled back to e…
slots   episode 0: score 62.0, twin 22.0
slot    epoch 8/8 stage      seed       alpha contribution params
r0c0    ░░▒▒▓◆◆◆  fossilized conv_light  1.00  +21.9 ± 0.8    148
r0c1    ·░░░✂--~  dormant    –              –            –      –
r0c2    ······░✂  pruned     –              –            –      –
"""
TRAINING_SCREEN = """\
digits_impaired · ppo · stopped · iteration 42/100 · 0:01:36 · 13.9 steps/s
━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━╸━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━
score    42.7  best 42.7                 ▂▃▃▃▃▃▄▄▄▄▄▄▅▅▅▅▅▆▆▆▆▆▇▇▇▇▇▇██
twin     16.7  lead +26.0                ▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁
params    820  ×3.28 the host's 250
return  +0.79  quartiles +0.39 to +0.92  ▁▁▁▂▂▂▂▃▃▃▃▄▄▄▄▅▅▅▅▆▆▆▆▇▇▇▇███
argmax   65.0  best 65.0                 ▁▃▆█
policy  broken episodes 1 >0      explained variance -0.25 <0.3
        value nrmse –             approx kl 0.0812 >0.06
        clip fraction 0.95 >0.75  ratio max 7.5 >5
        ratio min 0.5             first ratio error 1e-07
        grad norm 140 >100        forced share 0.72 >0.6
entropy op 1             slot 0.58            blueprint 0.16  style 0 <0.1
        tempo 0.04 <0.1  alpha_target 0 <0.1  alpha_speed –   alpha_curve –
ops     wait 39 %  germ 42 %  alpha 0 %  prune 0 %  foss 19 %  adv 0 %
alerts  ■ non-finite-update  policy  found –  iteration 42  Lower learning_rate.
        ▲ kl  policy  found 0.0812, limit 0.06  iteration 42  Lower learning_ra…
slots   iteration 42, environment 3: score 62.0, twin 22.0
slot    epoch 8/8 stage      seed       alpha contribution params
r0c0    ░░▒▒▓◆◆◆  fossilized conv_light  1.00  +21.9 ± 0.8    148
r0c1    ·░░░✂--~  dormant    –              –            –      –
r0c2    ······░✂  pruned     –              –            –      –
"""


def lines_of(run: Path, width: int, env: int | None = None) -> list[list[Segment]]:
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    return console.render_lines(screen(open_run(run), width, env), pad=False)


def text_of(run: Path, width: int = 80, env: int | None = None) -> str:
    lines = ("".join(segment.text for segment in line) for line in lines_of(run, width, env))
    return "".join(line.rstrip() + "\n" for line in lines)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("runs") / "run", [*a_run(), fake_run.alert_row()])


@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("runs") / "run", fake_training.troubled_course(42))


def test_terminal_screens_fit_80_columns_and_24_lines(finished: Path, troubled: Path) -> None:
    assert text_of(finished) == RUN_SCREEN
    assert text_of(troubled) == TRAINING_SCREEN
    assert TRAINING_SCREEN.count("\n") <= 24


def test_no_line_of_the_terminal_screen_is_wider_than_the_terminal(finished: Path, troubled: Path) -> None:
    for width in (20, 63, 159):
        for run in (finished, troubled):
            assert max(map(cell_len, text_of(run, width).splitlines())) <= width


def test_terminal_screen_shows_metrics_outside_their_normal_range_in_bold(troubled: Path) -> None:
    lines = lines_of(troubled, 200)

    def style_of(text: str) -> str:
        return next(str(segment.style) for line in lines for segment in line if text in segment.text)

    assert LOOKS[Stage.FOSSILIZED].colour.lower() in style_of("◆")
    assert LOOKS[Stage.TRAINING].colour.lower() in style_of("░")
    assert SEVERITIES["error"].colour.lower() in style_of("non-finite-update")
    assert style_of("approx kl 0.0812 >0.06") == style_of("tempo 0.04 <0.1") == "bold"
    assert style_of("ratio min 0.5") == "dim"


def test_pruning_stays_visible_when_a_narrow_terminal_merges_epochs_of_a_slot(tmp_path: Path) -> None:
    """Use a terminal of 63 columns, in which each glyph of a slot's timeline stands for two epochs."""
    write(tmp_path / "run", a_run())
    lane = next(line for line in text_of(tmp_path / "run", 63).splitlines() if line.startswith("r0c1"))

    assert lane.split()[1] == "░░✂~"


def test_terminal_screen_shows_the_selected_environment_of_a_training(troubled: Path) -> None:
    assert "slots   iteration 42, environment 0: score 62.0, twin 22.0\n" in text_of(troubled, env=0)


def test_terminal_screen_waits_for_the_first_telemetry_row_and_finally_shows_the_last_epoch(
    tmp_path: Path,
) -> None:
    """Allow so little time for refreshing that the run is read at most once before the read at the end."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system=None, width=80, height=24)
    view = TerminalView(tmp_path / "run", console, share_of_time=1e-9)
    row, *later = a_run()
    with RunWriter(tmp_path / "run") as writer, view:
        view.refresh()
        assert "waiting for the run to begin" in file.getvalue()
        for rows in ([row], later):
            for each in rows:
                writer.emit(each)
            writer.flush()
            view.refresh()
            view._draw()

    last = file.getvalue().rsplit("digits_impaired", 1)[1]
    assert "running · epoch 8/8" in last
    assert "r0c0    ░░▒▒▓◆◆◆  fossilized" in last
    assert last.endswith("\x1b[?25h")


def test_terminal_screen_is_computed_once_per_refresh_and_not_for_every_frame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(terminal, "screen", lambda *_: asked.append(1) or "x")
    monkeypatch.setattr(terminal, "DRAWS_PER_SECOND", 1e-3)
    console = Console(file=io.StringIO(), force_terminal=True, width=80, height=24)
    write(tmp_path / "run", a_run())
    with TerminalView(tmp_path / "run", console, share_of_time=1e3) as view:
        view.refresh()
        for _ in range(3):
            view._draw()
        assert len(asked) == 1
        view.refresh()
        view._draw()
        assert len(asked) == 2


def test_printed_epoch_line_shows_the_number_of_skipped_float16_steps() -> None:
    row = replace(fake_run.epoch_row(1), skipped_steps=3)
    line = line_of(LogEntry(row), fake_run.run_row())
    assert line is not None
    assert line.endswith("| float16 steps left out: 3")
