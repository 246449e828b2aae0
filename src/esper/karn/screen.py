"""A run or a training as one terminal screen: state in, text out, with nothing drawn from anywhere else.

Sections stand in the order of the questions they answer. A wide screen has two columns of them. Colour
means stage or severity only; a number inside its band is dim, outside bright with the limit beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.text import Text

from esper.karn.following import Following
from esper.karn.sections import episode, episodes, lanes, policy, progress
from esper.karn.sections.frame import alerts, header
from esper.karn.sections.layout import GAP, Section, beside, stack
from esper.leyline.events import RunRow

TWO_COLUMNS: Final = 160
"""From so many columns on sections stand side by side."""
OF_POLICY: Final = 80
"""Columns for what decides in a run."""

Columns = tuple[Sequence[Section], Sequence[Section], Sequence[Section]]
"""Sections of the left column, of the right one, and those that may stand below the left ones."""


def render(state: Following, width: int, height: int) -> Text:
    """The screen, at most ``width`` columns wide and ``height`` lines high."""
    lines = [header(state, width)]
    if state.run is not None:
        lines += _body(state, state.run, width, height - 1)
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Text("\n").join(lines[:height])


def _body(state: Following, run: RunRow, width: int, height: int) -> list[Text]:
    wrong = alerts(state, width)
    if width < TWO_COLUMNS:
        left, right, below = _sections(state, run, width, width)
        return stack([*left, *right, *below, wrong], height)
    # A run has more to say of its slots, a training of its policy.
    column = width - GAP - OF_POLICY if run.iterations is None else (width - GAP) // 2
    left, right, below = _sections(state, run, column, width - GAP - column)
    room = max(height - wrong.least - 1, 0)
    both = beside(stack([*left, *below], room), stack(right, room), column)
    return [*both, Text(), *stack([wrong], height - len(both) - 1)]


def _sections(state: Following, run: RunRow, left: int, right: int) -> Columns:
    """All sections, for a left column and a right one of so many columns."""
    return (
        _of_run(state, run, left, right) if run.iterations is None else _of_training(state, run, left, right)
    )


def _of_run(state: Following, run: RunRow, left: int, right: int) -> Columns:
    shown = state.episode
    return (
        [episode.scores(run, shown, left), lanes.slots(run, shown, left)],
        [
            episode.policy_outputs(run, shown, right),
            episode.ops(run, shown, right),
            episode.events(run, shown),
            episode.phases(shown, right),
        ],
        [episode.course(run, shown, left)],
    )


def _of_training(state: Following, run: RunRow, left: int, right: int) -> Columns:
    shown = state.episode
    return (
        [progress.progress(state, run, left), lanes.slots(run, shown, left, episodes.episode_title(state))],
        [
            policy.policy(state, right),
            policy.entropies(state, run, right),
            policy.ops(state, run, right),
            policy.rewards(state, right),
            episodes.phases(state, right),
        ],
        [episodes.episodes(state, run, left), episode.events(run, shown), progress.fan(state, left)],
    )
