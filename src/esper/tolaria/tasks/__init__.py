"""Task presets, which are selected by name, and tasks of the user."""

from collections.abc import Callable
from pathlib import Path

from esper.leyline.errors import EsperError, UnknownNameError
from esper.tolaria.tasks import digits, images, tabular, text
from esper.tolaria.tasks.images import image_scaling
from esper.tolaria.tasks.spec import TaskSpec
from esper.tolaria.tasks.text import text_scaling
from esper.tolaria.tasks.user_tasks import imported_task, module_task

TASKS: dict[str, TaskSpec] = {
    task.name: task
    for module in (digits, text, images, tabular)
    for task in vars(module).values()
    if isinstance(task, TaskSpec)
}
"""All task presets by name, in the order of their definition."""


DATA_TASKS: dict[str, Callable[[Path | None], TaskSpec]] = {
    "text_scaling": text_scaling,
    "image_scaling": image_scaling,
}
"""Functions that return the tasks on a file or folder of the user, by name."""


def task_named(name: str, data: Path | None = None) -> TaskSpec:
    """Return the task preset called ``name``, or the task that ``package.module:function`` returns.

    ``data`` is the file of ``text_scaling`` or the folder of ``image_scaling``.
    """
    if name in DATA_TASKS:
        return DATA_TASKS[name](data and data.absolute())
    if data is not None:
        raise EsperError(
            f"task '{name}' has its own data and cannot use '{data}'; choose {' or '.join(DATA_TASKS)}, or"
            " leave out data"
        )
    if name in TASKS:
        return TASKS[name]
    if ":" in name:
        return imported_task(name)
    raise UnknownNameError("task", name, [*TASKS, *DATA_TASKS])


def register_task(task: TaskSpec) -> None:
    """Add a task to the task presets of this process."""
    if task.build is None and TASKS.get(task.name, task) is not task:
        raise EsperError(f"task '{task.name}' exists already; choose another name")
    TASKS[task.name] = task


__all__ = ["TASKS", "TaskSpec", "module_task", "register_task", "task_named"]
