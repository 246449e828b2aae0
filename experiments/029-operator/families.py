"""Tasks of the study of the operator, one for each family of networks."""

from __future__ import annotations

from dataclasses import replace

from esper.tolaria.tasks import TaskSpec, task_named

STEPS = 40
GIGA = 10**9
FAMILIES = {
    "text": ("pycode_scaling", {"learning_rate": 8e-3, "budget": 200 * GIGA}),
    "cnn": ("clothes14_scaling", {"width": 8, "batch_size": 64, "learning_rate": 4e-3, "budget": 90 * GIGA}),
    "mlp": ("teacher_scaling", {"width": 32, "learning_rate": 6e-3, "budget": 8 * GIGA}),
    "vit": ("vit_scaling", {"learning_rate": 3e-3, "budget": 60 * GIGA}),
    "gru": ("gru_scaling", {"budget": 50 * GIGA}),
}


def families(blocks: int = 1) -> dict[str, TaskSpec]:
    """Return the task of every family, with networks of ``blocks`` blocks."""
    tasks = {name: task_named(task).with_instance(**values) for name, (task, values) in FAMILIES.items()}
    return {name: replace(task.with_trunk(blocks), horizon=STEPS) for name, task in tasks.items()}
