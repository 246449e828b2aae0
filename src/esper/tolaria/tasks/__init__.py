"""Task presets by name."""

from esper.leyline.errors import UnknownNameError
from esper.tolaria.tasks import digits, images, text
from esper.tolaria.tasks.spec import TaskSpec

TASKS: dict[str, TaskSpec] = {
    task.name: task
    for module in (digits, text, images)
    for task in vars(module).values()
    if isinstance(task, TaskSpec)
}
"""All presets that these modules define, in their order."""


def task_named(name: str) -> TaskSpec:
    try:
        return TASKS[name]
    except KeyError:
        raise UnknownNameError("task", name, TASKS) from None


__all__ = ["TASKS", "TaskSpec", "task_named"]
