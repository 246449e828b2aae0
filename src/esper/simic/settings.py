"""Settings that runs, trainings and studies share: field types, ranges, hardware and episodes."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from esper.leyline.errors import EsperError

MOST: Final = 1_000_000
"""Largest number that a setting such as ``steps``, ``envs`` or ``iterations`` accepts."""
MOST_SLOTS: Final = 1_000


@contextmanager
def _collected() -> Iterator[None]:
    """Convert ``EsperError`` to ``ValueError``, which pydantic reports with all other invalid settings."""
    try:
        yield
    except EsperError as error:
        raise ValueError(str(error)) from None


def _known_task(name: str) -> str:
    from esper.tolaria.tasks import task_named  # noqa: PLC0415  The module loads torch, which --help does not need.

    with _collected():
        task_named(name)
    return name


def _known_devices(names: tuple[str, ...]) -> tuple[str, ...]:
    from esper.tolaria.devices import check_devices  # noqa: PLC0415  loads torch

    with _collected():
        check_devices(names)
    return names


TaskName = Annotated[str, AfterValidator(_known_task)]
PREFIXES: Final = {"": 1, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}


def _flops(given: object) -> object:
    """Convert text such as 0.5T or 3e9, or a number, to a number of FLOPs."""
    found = re.fullmatch(r"(\d{1,19}(?:\.\d{1,9})?(?:e\d{1,2})?)([MGTP]?)", str(given))
    if found is None or isinstance(given, bool):
        raise ValueError("a budget is a number of FLOPs such as 0.5T, 200G or 3e9")
    return round(float(found[1]) * PREFIXES[found[2]])


Flops = Annotated[int, BeforeValidator(_flops), Field(ge=1, le=10**18)]
DeviceName = Annotated[str, AfterValidator(lambda name: _known_devices((name,))[0])]
DeviceNames = Annotated[tuple[str, ...], Field(max_length=MOST_SLOTS), AfterValidator(_known_devices)]
AmpName = Literal["off", "bfloat16", "float16"]


class Hardware(BaseModel):
    """Settings for the devices of hosts and policy, and for the precision of training."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    devices: DeviceNames = ("cpu",)
    """Devices of the hosts: cpu, cuda, or cuda:0 cuda:1 …; environments are assigned to them in turn."""
    policy_device: DeviceName = "cpu"
    """Device of the policy network."""
    amp: AmpName = "off"
    """Mixed precision of hosts and seeds in training."""

    @model_validator(mode="after")
    def _devices_can(self) -> Self:
        from esper.tolaria.devices import check_enough  # noqa: PLC0415  loads torch
        from esper.tolaria.precision import check_amp  # noqa: PLC0415

        with _collected():
            check_amp(self.amp, self.devices)
            check_enough(self.devices, self.environments)
        return self

    @property
    def environments(self) -> int:
        """Number of hosts that are trained at the same time."""
        return 1


class EpisodeSettings(Hardware):
    """Settings for the task and the length of its episodes, shared by runs and policy trainings."""

    task: TaskName = "digits_impaired"
    """Task: a preset, or package.module:function that returns a task."""
    steps: int | None = Field(None, ge=1, le=MOST)
    """Number of epochs per episode; the preset's number unless given."""
    budget: Flops | None = None
    """FLOPs of an episode, such as 0.5T; if budgets vary, the largest; the preset's number unless given."""
    auto_forward: bool = True
    """Let seeds change stage automatically; otherwise a seed needs the op ADVANCE."""

    @model_validator(mode="after")
    def _has_one_length(self) -> Self:
        if self.budget is not None and self.steps is not None:
            raise ValueError("budget and steps both set the length of an episode; leave one of them out")
        return self
