"""Study file: arms, tasks, rng seeds and compute of a comparison."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, field_validator, model_validator

from esper.kasmina.optimizer_groups import DECAY_SHARE
from esper.leyline import ActionSpace, Controller, EsperError, UnknownNameError
from esper.run.run_config import ConfigError, Settings
from esper.simic.config import MOST, MOST_SLOTS, Flops, TaskName
from esper.tamiyo.controller_registry import CONTROLLERS, ControllerSettings, make_controller
from esper.tolaria.budget_marks import MARKS, branching_steps
from esper.tolaria.env import MorphEnv
from esper.tolaria.seeding import SELECTION_SEEDS, TEST_SEEDS
from esper.tolaria.tasks import TaskSpec, task_named

CLOCK: Final = "clock:"
COMPUTED: Final = ("halving", "extrapolated")
"""Kinds of arms that are computed from the runs of static arms."""
_ARGUMENTS: Final = {
    "clock": "the factor of the compute from one growth to the next, such as clock:1.8",
    "periodic": "a plan, such as periodic:stack@r0c0:12",
    "ppo": "the folder of a policy, such as ppo:runs/mine/best",
    "shuffled": "the folder of a policy, such as shuffled:runs/mine/best",
    "static_final": "the name of another arm, such as static_final:counting",
}
"""Argument that each kind of arm needs after the colon, such as FOLDER in ``ppo:FOLDER``, in words for an
error message.
"""
LONGEST_NAME: Final = 80
_NOT_GROWN: Final = ("static", "static_final", *COMPUTED)
KINDS: Final = ("static", "static_final", *COMPUTED, "clock", "schedule", "shuffled", *CONTROLLERS)


def parse_arm(text: str) -> tuple[str, str]:
    """Return the kind and the argument of an arm from its text ``kind:argument``, such as ``ppo`` and the
    folder of a policy.
    """
    kind, _, argument = text.partition(":")
    if kind not in KINDS:
        raise UnknownNameError("arm", kind, KINDS)
    if kind in _ARGUMENTS and not argument:
        raise EsperError(f"the arm '{kind}' needs {_ARGUMENTS[kind]}")
    if argument and kind not in _ARGUMENTS and kind != "static":
        raise EsperError(f"the arm '{kind}' takes nothing behind a colon; found '{argument}'")
    return kind, argument


def _named(given: object) -> object:
    """Return the arms of a study file by name. Each arm is a tuple: a single text such as ``counting``, or
    one text such as ``ppo:FOLDER`` per training of a policy.
    """
    if isinstance(given, list | tuple):
        texts = [_text("", one) for one in given]
        if len(set(texts)) != len(texts):
            raise ValueError(f"an arm may occur only once in a study; found {', '.join(texts)}")
        return {text: (text,) for text in texts}
    if isinstance(given, Mapping):
        return {str(name): _members(str(name), value) for name, value in given.items()}
    raise ValueError("arms are a list such as ['off', 'static'] or a table of names")


def _members(name: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        return (_text(name, value),)
    texts = tuple(_text(name, one) for one in value)
    kinds = {text.partition(":")[0] for text in texts}
    if kinds not in ({"ppo"}, {"shuffled"}):
        raise ValueError(
            f"a list of arms is one arm of several trainings, all ppo:FOLDER or all shuffled:FOLDER; '{name}'"
            f" has {', '.join(texts) or 'none'}"
        )
    return texts


def _text(name: str, one: object) -> str:
    if isinstance(one, Mapping) and "budget" in one:
        raise ValueError(
            f"arm '{name or one.get('arm', '')}' has a separate budget, {one['budget']}; all arms of a"
            " study spend the same compute: give one budget for the study, or several marks"
        )
    if not isinstance(one, str):
        raise ValueError(f"an arm is a text such as 'static:3' or 'counting'; found {str(one)[:80]}")
    return one


class StudyConfig(Settings):
    """Validated content of a study file."""

    data: Path | None = None
    """File of the task text_scaling, or folder of the task image_scaling."""
    tasks: tuple[TaskName, ...] = Field(min_length=1)
    """Tasks: presets, or package.module:function."""
    arms: Annotated[dict[str, tuple[str, ...]], BeforeValidator(_named)] = Field(min_length=1)
    """Arms of the comparison: a list of controllers or plans as texts, or a table that names each arm."""
    control: str | None = None
    """Arm that the others are compared with; the first unless given."""
    budget: Flops | None = None
    """FLOPs of a run; the preset's unless given."""
    steps: int | None = Field(None, ge=1, le=MOST)
    """Number of steps that share the FLOPs of a run; the preset's unless given."""
    slots: int | None = Field(None, ge=1, le=MOST_SLOTS)
    """Number of slots of the host; the preset's unless given."""
    marks: tuple[Annotated[float, Field(gt=0, le=1)], ...] = MARKS
    """Shares of the budget at which a run is scored; 1 is the end of the run."""
    rng_seeds: int = Field(5, ge=1, le=MOST)
    """Number of rng seeds that are reported."""
    first_rng_seed: int = Field(TEST_SEEDS.start, ge=0, lt=2**62)
    """First of the rng seeds that are reported."""
    selection_rng_seeds: int = Field(2, ge=0, le=MOST)
    """Number of rng seeds for choosing learning rates and plans; with 0, nothing may be chosen."""
    learning_rate_factors: tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...] = Field(
        (0.5, 1.0, 2.0), min_length=1
    )
    """Factors on the preset's learning rate; each arm uses the factor with the least validation loss."""
    schedule_episodes: int = Field(48, ge=1, le=MOST)
    """Number of episodes that search the plan of arm 'schedule'."""

    @field_validator("marks")
    @classmethod
    def _marks_end_with_the_budget(cls, marks: tuple[float, ...]) -> tuple[float, ...]:
        if list(marks) != sorted(set(marks)) or marks[-1:] != (1.0,):
            raise ValueError(f"marks rise from one to the next, and the last is 1; found {list(marks)}")
        return marks

    @model_validator(mode="after")
    def _names_and_seeds_fit(self) -> StudyConfig:
        found = self.evaluation
        if found.start < SELECTION_SEEDS.stop and SELECTION_SEEDS.start < found.stop:
            raise ValueError(
                f"rng seeds {found.start} to {found.stop - 1} lie among those to choose with"
                f" ({SELECTION_SEEDS.start} to {SELECTION_SEEDS.stop - 1}); choose another first_rng_seed"
            )
        if not self.selection_rng_seeds and (
            len(self.learning_rate_factors) > 1 or any("schedule" in texts for texts in self.arms.values())
        ):
            raise ValueError(
                "with selection_rng_seeds = 0 rates and plans would be chosen by what is reported; name one"
                " of learning_rate_factors and no schedule, or give rng seeds to choose with"
            )
        return self

    @property
    def evaluation(self) -> range:
        """Rng seeds of the runs whose results are reported."""
        return range(self.first_rng_seed, self.first_rng_seed + self.rng_seeds)

    @property
    def selection(self) -> range:
        """Rng seeds of the selection phase; equal to the reported rng seeds if ``selection_rng_seeds``
        is 0.
        """
        return SELECTION_SEEDS[: self.selection_rng_seeds] if self.selection_rng_seeds else self.evaluation

    def task(self, name: str) -> TaskSpec:
        """Return the task preset with the slots, steps and budget of the study."""
        task = task_named(name, self.data)
        if self.slots is not None:
            task = task.with_slots(self.slots)
        return replace(task, horizon=self.steps or task.horizon, budget=self.budget or task.budget)

    def policies(self) -> list[Path]:
        """Return the folders of all policies in the arms of the study."""
        arms = [parse_arm(text) for members in self.arms.values() for text in members]
        return sorted({Path(argument) for kind, argument in arms if kind in ("ppo", "shuffled")})


def arms_of(config: StudyConfig, task: TaskSpec) -> dict[str, tuple[str, ...]]:
    """Return the arms of the study by name, each as a tuple of texts; the arm ``static`` becomes one arm per
    network size.
    """
    arms: dict[str, tuple[str, ...]] = {}
    for name, texts in config.arms.items():
        found = {name: texts}
        if texts == ("static",):
            found = {f"{name}:{size}": (f"static:{size}",) for size in sizes_of(task)}
        if twice := arms.keys() & found.keys():
            raise EsperError(f"two arms have the name '{min(twice)}'; give one of them another")
        arms |= found
    return arms


def sizes_of(task: TaskSpec) -> range:
    """Return the numbers of blocks that the host of a task can reach by growth; empty if the task has no
    trunk or several trunks.
    """
    trunk, *others = task.instances.trunks
    return range(0) if trunk is None or others else range(trunk, trunk + task.num_slots + 1)


def clock_plan(task: TaskSpec, text: str) -> str:
    """Return the plan of the arm ``text``, such as ``clock:1.8``: it copies a block whenever the compute has
    grown by this factor, starting from 1/32 of the budget (so the first copy is at 1.8/32 of it).

    Raises:
        EsperError: The factor is no number above 1, or the first copy would come in the decay phase.
    """
    factor = 0.0
    with suppress(ValueError):
        factor = float(text.removeprefix(CLOCK))
    last, steps = (1.0 - DECAY_SHARE) * task.horizon, list[int]()
    at = MARKS[0] * factor * task.horizon
    while factor > 1.0 and at < last and len(steps) < task.num_slots:
        steps.append(max(round(at), steps[-1] + 1 if steps else 1))
        at *= factor
    if not steps:
        most = last / task.horizon / MARKS[0]
        raise EsperError(f"'{text}' never grows; give a factor above 1 and below {most:g}")
    slots = zip(task.slot_config.slot_ids, steps, strict=False)
    return ",".join(f"stack@{slot}:{step}" for slot, step in slots)


def controller_of(text: str, space: ActionSpace, rng_seed: int) -> Controller:
    """Return a controller from the text of an arm, such as ``counting`` or ``ppo:FOLDER``."""
    kind, _, argument = text.partition(":")
    settings = ControllerSettings(rng_seed=rng_seed, plan=argument, checkpoint=Path(argument))
    return make_controller(kind, space, settings)


def check_study(config: StudyConfig) -> None:
    """Raise a ``ConfigError`` that lists all problems of a study, such as arms that cannot run on one of its
    tasks.
    """
    problems = [problem for name in config.tasks for problem in _problems(config, config.task(name))]
    if problems:
        raise ConfigError("; ".join(dict.fromkeys(problems)))


def _problems(config: StudyConfig, task: TaskSpec) -> Iterator[str]:
    if task.budget is None:
        yield f"task '{task.name}' has no budget that arms could share; give one, such as budget = '2G'"
        return
    yield from _said(lambda: branching_steps(task, config.marks))
    yield from _said(lambda: _check_names(config, task))
    space: list[ActionSpace] = []
    yield from _said(lambda: space.append(space_of(task)))
    for members in config.arms.values():
        for text in members:
            if space:
                yield from _said(lambda text=text: _check_arm(config, task, space[0], text))


def _check_names(config: StudyConfig, task: TaskSpec) -> None:
    names = arms_of(config, task)
    if config.control is not None and config.control not in names:
        raise UnknownNameError("arm as control", config.control, names)
    for name in names:
        if not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
            raise EsperError(
                f"the name of an arm has 1 to {LONGEST_NAME} printable letters; found {name[:80]!r}:"
                " give it a short one in a table [arms]"
            )


def _said(check: Any) -> Iterator[str]:
    try:
        check()
    except EsperError as error:
        yield str(error)


def space_of(task: TaskSpec, rng_seed: int = SELECTION_SEEDS.start) -> ActionSpace:
    """Return the action space of a new host; raise an error if the compute budget is too small for a step."""
    env = MorphEnv(task, rng_seed=rng_seed)
    env.reset()
    return env.action_space


def _check_arm(config: StudyConfig, task: TaskSpec, space: ActionSpace, text: str) -> None:
    kind, argument = parse_arm(text)
    sizes = sizes_of(task)
    if kind in ("static", "clock", *COMPUTED) and not sizes:
        raise EsperError(
            f"task '{task.name}' has no static sizes, since its slots do not stand in series behind a trunk;"
            f" leave out '{text}', or choose another task"
        )
    if kind == "static" and argument and argument not in map(str, sizes):
        raise EsperError(
            f"'{text}' is a size that growth cannot reach on {task.name}; its sizes are"
            f" {sizes[0]} to {sizes[-1]} blocks"
        )
    if kind == "static":
        space_of(task.with_trunk(int(argument or sizes[-1])))
    if kind in COMPUTED and sum(own[0].startswith("static:") for own in arms_of(config, task).values()) < 2:
        raise EsperError(f"the arm '{kind}' chooses among fixed sizes; add the arm static, or two static:N")
    if kind == "clock":
        clock_plan(task, text)
    if kind == "static_final":
        grown = {name: m for name, m in config.arms.items() if parse_arm(m[0])[0] not in _NOT_GROWN}
        if argument not in grown:
            raise UnknownNameError("grown arm", argument, grown)
    if kind in CONTROLLERS:
        controller_of(text, space, 0)
    if kind == "shuffled":
        controller_of(f"ppo:{argument}", space, 0)
