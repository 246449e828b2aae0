"""Task presets, which are selected by name, and tasks of the user."""

from esper.leyline.errors import EsperError, UnknownNameError
from esper.tolaria.tasks import digits, images, text
from esper.tolaria.tasks.spec import TaskSpec
from esper.tolaria.tasks.user_tasks import imported_task, module_task

TASKS: dict[str, TaskSpec] = {
    task.name: task
    for module in (digits, text, images)
    for task in vars(module).values()
    if isinstance(task, TaskSpec)
}
"""All task presets by name, in the order of their definition."""


def task_named(name: str) -> TaskSpec:
    """Return the task preset called ``name``, or the task that ``package.module:function`` returns."""
    if name in TASKS:
        return TASKS[name]
    if ":" in name:
        return imported_task(name)
    raise UnknownNameError("task", name, TASKS)


def register_task(task: TaskSpec) -> None:
    """Add a task to the task presets of this process."""
    if task.build is None and TASKS.get(task.name, task) is not task:
        raise EsperError(f"task '{task.name}' exists already; choose another name")
    TASKS[task.name] = task


__all__ = ["TASKS", "TaskSpec", "module_task", "register_task", "task_named"]
