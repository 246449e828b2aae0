"""Task presets by name."""

from esper.leyline.errors import UnknownNameError
from esper.tolaria.tasks.digits import DIGITS, DIGITS_IMPAIRED, DIGITS_MIXTURE
from esper.tolaria.tasks.images import (
    CIFAR,
    CIFAR_IMPAIRED,
    FASHION,
    FASHION14,
    FASHION14_IMPAIRED,
    FASHION_SCALING,
)
from esper.tolaria.tasks.spec import TaskSpec
from esper.tolaria.tasks.text import PYCODE, PYCODE_SCALING, TEXT

TASKS: dict[str, TaskSpec] = {
    task.name: task
    for task in (
        DIGITS,
        DIGITS_IMPAIRED,
        DIGITS_MIXTURE,
        PYCODE,
        PYCODE_SCALING,
        TEXT,
        FASHION14,
        FASHION14_IMPAIRED,
        FASHION,
        FASHION_SCALING,
        CIFAR,
        CIFAR_IMPAIRED,
    )
}


def task_named(name: str) -> TaskSpec:
    try:
        return TASKS[name]
    except KeyError:
        raise UnknownNameError("task", name, TASKS) from None


__all__ = ["TASKS", "TaskSpec", "task_named"]
