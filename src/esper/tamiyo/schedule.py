"""Plans of germinations for the periodic controller, and the text in which a plan is written.

Forms of the text of a plan, with their meaning::

    conv_heavy@r0c0:0,conv_light/fast@r0c1:4     blueprint[/option…]@slot:step, separated by commas
    every:3                                      every third step, all blueprints of the host in turn
    every:3:conv_heavy,norm/gated_gate           every third step, the named ones in turn

The options of a seed are, in any order: a blend style, a tempo (fast, standard, slow), and an alpha target
(half, seventy, full). Step 0 is the decision before the first epoch.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from esper.leyline import ActionSpace, AlphaTarget, BoolArray, EsperError, Style, Tempo, UnknownNameError

_FORM: Final = "blueprint@slot:step (for example conv_heavy@r0c0:0)"
_OPTIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    **{style.name.lower(): {"style": style} for style in Style},
    **{tempo.name.lower(): {"tempo": tempo} for tempo in Tempo},
    **{target.name.lower(): {"alpha_target": target} for target in AlphaTarget},
}


class SeedChoice(NamedTuple):
    """Blueprint, style, tempo and alpha target of a germination, in ``Head`` order."""

    blueprint: int
    style: Style = Style.LINEAR_ADD
    tempo: Tempo = Tempo.STANDARD
    alpha_target: AlphaTarget = AlphaTarget.FULL


class ScheduleEntry(NamedTuple):
    """One germination of a plan: step, slot and kind of seed."""

    step: int
    slot: int
    seed: SeedChoice


class Plan(Protocol):
    """Interface of a plan, which returns the germination that is planned for a step of an episode, if any."""

    def due(self, step: int, free: BoolArray) -> tuple[int, SeedChoice] | None:
        """Return the slot and kind of seed to germinate at ``step``; None if there is no germination.

        Args:
            step: Number of earlier decisions in the episode.
            free: Bool ``[slot]``, whether a germination in each slot is legal.
        """


class Schedule:
    """Plan of germinations at given steps; a germination is skipped if its slot is not free at that step."""

    def __init__(self, entries: tuple[ScheduleEntry, ...]) -> None:
        self.entries = entries
        self._by_step = {entry.step: entry for entry in entries}
        if len(self._by_step) != len(entries):
            steps = [entry.step for entry in entries]
            twice = next(step for step in steps if steps.count(step) > 1)
            raise EsperError(f"a step has one action, but the schedule germinates twice at step {twice}")

    def due(self, step: int, free: BoolArray) -> tuple[int, SeedChoice] | None:
        entry = self._by_step.get(step)
        if entry is None or not free[entry.slot]:
            return None
        return entry.slot, entry.seed


class Rotation:
    """Plan of a germination every ``period`` steps, cycling through ``seeds``, in the first free slot.

    Without a free slot a germination is skipped and not postponed: the blueprint depends on the step alone.
    """

    def __init__(self, period: int, seeds: tuple[SeedChoice, ...]) -> None:
        if period < 1:
            raise EsperError(f"a rotation needs a period of at least 1 step; found {period}")
        if not seeds:
            raise EsperError("a rotation needs at least one blueprint; none was named")
        self.period = period
        self.seeds = seeds

    def due(self, step: int, free: BoolArray) -> tuple[int, SeedChoice] | None:
        turn, rest = divmod(step, self.period)
        if rest or not free.any():
            return None
        return int(np.argmax(free)), self.seeds[turn % len(self.seeds)]


def blueprint_index(name: str, space: ActionSpace) -> int:
    """Return the index of a selectable blueprint; raises ``UnknownNameError`` for other names."""
    selectable = {space.blueprint_names[index]: index for index in space.blueprints}
    if name not in selectable:
        raise UnknownNameError("blueprint", name, selectable)
    return selectable[name]


def parse_plan(text: str, space: ActionSpace) -> Plan:
    """Return the plan that ``text`` describes; the docstring of this module lists the text forms."""
    if text.strip().startswith("every:"):
        return _parse_rotation(text.strip(), space)
    return Schedule(tuple(_parse_entry(part, space) for part in _parts(text)))


def planned_blueprints(text: str) -> set[str] | None:
    """Return the names of the blueprints in the text of a plan; None if it plants all of the host in turn."""
    _, _, rotation = text.strip().removeprefix("every:").partition(":")
    names = rotation if text.strip().startswith("every:") else text
    return {part.partition("@")[0].split("/")[0].strip() for part in names.split(",")} if names else None


def _parts(text: str) -> Iterator[str]:
    for part in text.split(","):
        if not part.strip():
            raise EsperError(f"empty entry in schedule '{text}'; write {_FORM}, separated by commas")
        yield part.strip()


def _parse_entry(text: str, space: ActionSpace) -> ScheduleEntry:
    seed, _, place = text.partition("@")
    slot_id, _, step = place.partition(":")
    if not (seed and slot_id and step):
        raise EsperError(f"schedule entry '{text}' does not read {_FORM}")
    number = _parse_number(step, f"step of schedule entry '{text}'")
    return ScheduleEntry(number, space.slot_config.index_of(slot_id), _parse_seed(seed, space))


def _parse_rotation(text: str, space: ActionSpace) -> Rotation:
    _, _, rest = text.partition(":")
    period, has_list, names = rest.partition(":")
    number = _parse_number(period, f"period of '{text}'")
    if not has_list:
        return Rotation(number, tuple(SeedChoice(index) for index in space.blueprints))
    return Rotation(number, tuple(_parse_seed(part, space) for part in _parts(names)))


def _parse_seed(text: str, space: ActionSpace) -> SeedChoice:
    name, *options = text.split("/")
    seed = SeedChoice(blueprint_index(name, space))
    for option in options:
        if option not in _OPTIONS:
            raise UnknownNameError("seed option", option, _OPTIONS)
        seed = seed._replace(**_OPTIONS[option])
    return seed


LONGEST_NUMBER: Final = 9
"""Largest number of digits of a step number in a plan."""


def _parse_number(text: str, what: str) -> int:
    # Accept the decimal digits of any writing system, as int does.
    if not text.isdecimal() or len(text) > LONGEST_NUMBER:
        raise EsperError(f"the {what} must be a whole number from 0; found '{text[:80]}'")
    return int(text)
