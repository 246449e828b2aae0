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
"""All presets of these modules, in the order of their definition."""


def task_named(name: str) -> TaskSpec:
    """Return the preset of this name; raises UnknownNameError."""
    try:
        return TASKS[name]
    except KeyError:
        raise UnknownNameError("task", name, TASKS) from None


__all__ = ["TASKS", "TaskSpec", "task_named"]
