"""Scaling tasks: their data, hosts of every size, instances, and data of the user."""

import hashlib
import io
import re
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from esper.kasmina.random_streams import TorchStream
from esper.leyline import CANONICAL_ACTION, OP_GERMINATE, DataError, EsperError, HostError
from esper.leyline.factored_actions import Head
from esper.study.study_config import sizes_of
from esper.tolaria.budget_marks import branching_steps
from esper.tolaria.env import MorphEnv
from esper.tolaria.tasks import TASKS, TaskSpec, task_named
from esper.tolaria.tasks.images import glyphs
from esper.tolaria.tasks.packaged import packaged
from esper.tolaria.tasks.tabular import diamonds, split_table, teacher

OWN = ("diamonds", "clothes14", "clothes28", "glyphs", "vit", "teacher", "pycode", "prose", "headers", "gru")
NAMES = [f"{name}_scaling" for name in OWN]
"""Scaling tasks whose data every installation has."""


def generator(rng_seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(rng_seed)


def started(task: TaskSpec, trunk: int = 1) -> MorphEnv:
    env = MorphEnv(task.with_trunk(trunk), rng_seed=1_000_000)
    env.reset()
    return env


def test_ten_tasks_of_five_kinds_of_host_have_their_data_in_the_package_and_two_are_held_out() -> None:
    assert {TASKS[name].host for name in NAMES} == {"gpt", "residual", "mlp", "vit", "gru"}
    assert [name for name, task in TASKS.items() if task.held_out] == ["headers_scaling", "glyphs_scaling"]


@pytest.mark.parametrize("name", NAMES)
def test_growing_one_copied_block_gives_a_network_of_the_next_fixed_size(name: str) -> None:
    task = replace(TASKS[name], budget=TASKS[name].budget // 8)
    env = started(task)
    action = np.array(CANONICAL_ACTION)
    action[Head.OP], action[Head.SLOT] = OP_GERMINATE, 0
    action[Head.BLUEPRINT] = env.action_space.blueprint_names.index("stack")
    facts = env.step(action)
    assert env.host.minibatches > 0
    assert np.isfinite(facts.train_loss)
    assert sum(env.model.count_parameters()) == sum(started(task, 2).model.count_parameters())


@pytest.mark.parametrize("name", NAMES)
def test_the_largest_fixed_size_can_be_trained_up_to_the_smallest_mark(name: str) -> None:
    task = TASKS[name]
    steps = branching_steps(task, (1 / 32, 1.0))
    env = started(task.until(1 / 32), sizes_of(task)[-1])
    assert list(steps) == [4, 128]
    assert env.host.minibatches_left() >= 10


@pytest.mark.parametrize("name", ["clothes", "glyphs", "diamonds"])
def test_packaged_data_have_the_digest_that_is_stated(name: str) -> None:
    folder = files("esper.tolaria.tasks")
    stated = re.findall("[0-9a-f]{64}", folder.joinpath("scaling_data.md").read_text())
    content = folder.joinpath(f"{name}.npz.xz").read_bytes()
    assert hashlib.sha256(content).hexdigest() in stated


@pytest.mark.parametrize("name", ["pycode_scaling", "prose_scaling", "headers_scaling"])
def test_texts_are_ascii_of_at_least_a_megabyte_and_their_digests_differ(name: str) -> None:
    splits = TASKS[name].load(generator())
    assert splits.train.inputs.numel() > 10**6
    assert int(splits.train.inputs.max()) < TASKS[name].classes == 128
    others = {TASKS[other].digest() for other in NAMES[-4:-1]}
    assert len(others) == 3
    assert TASKS[name].digest() == TASKS[name].digest()


def test_a_letter_is_in_one_split_in_all_its_fonts() -> None:
    splits = glyphs(generator())
    splits.test.unlock()
    groups = packaged("glyphs")["groups"].int()
    parts = [splits.train, splits.validation, splits.test.read()]
    letters = [set(groups[part.index.long()].tolist()) for part in parts]
    assert sum(map(len, parts)) == len(groups)
    assert sum(map(len, letters)) == len(set(groups.tolist()))
    assert len(parts[0]) > 0.7 * len(groups)


def test_tables_are_standardised_by_their_training_split() -> None:
    splits = split_table(diamonds, generator())
    assert splits.train.y.mean().item() == pytest.approx(0, abs=1e-4)
    assert splits.train.y.std().item() == pytest.approx(1, abs=1e-4)
    assert splits.train.x.abs().max() == 5.0
    assert splits.validation.y.mean().item() != pytest.approx(0, abs=1e-4)
    assert splits.guess_loss() == pytest.approx(1, abs=1e-3)


def test_a_teacher_is_the_same_in_every_process_and_leaves_the_global_random_stream_alone() -> None:
    with TorchStream(5):
        expected = torch.rand(1)
    with TorchStream(5):
        first = teacher(8)
        assert torch.equal(torch.rand(1), expected)
    teacher.cache_clear()
    assert torch.equal(teacher(8)[1], first[1])
    assert not torch.equal(teacher(16)[1], first[1])


def test_an_instance_sets_width_rate_batch_size_data_and_budget() -> None:
    task = task_named("teacher_scaling")
    chosen = task.with_instance(width=16, learning_rate=0.01, batch_size=32, data_share=0.25, budget=10**9)
    plain, env = started(task), started(chosen)
    assert env.host.batch_size == 32
    assert env.host.instance.learning_rate == 0.01
    assert len(env.host.splits.train) == round(0.25 * len(plain.host.splits.train))
    assert env.host.budget == 10**9
    assert env.model.count_parameters()[0] == 16 * 16 + 16 + 2 * (16 * 16 + 16) + 2 * 32 + 16 + 1
    before = env.host.meter.ledger.charged
    env.step(np.array(CANONICAL_ACTION))
    per_sample = env.host.meter.minibatch(1)
    assert env.host.meter.ledger.charged - before == env.host.minibatches * 32 * per_sample


@pytest.mark.parametrize("wrong", [{"width": 0}, {"data_share": 1.5}, {"budget": -1}, {"batch_size": 0}])
def test_an_instance_that_cannot_be_built_is_refused(wrong: dict[str, int]) -> None:
    name, value = next(iter(wrong.items()))
    with pytest.raises(HostError, match=f"{name} of an instance of 'vit_scaling' is {value}; give"):
        task_named("vit_scaling").with_instance(**wrong)


# --- data of the user ---------------------------------------------------------------------------------


def write_images(folder: Path, *classes: str, count: int = 40, side: int = 8) -> Path:
    values = np.random.default_rng(0)
    for name in classes:
        (folder / name).mkdir(parents=True)
        for number in range(count):
            image, content = Image.fromarray(values.integers(0, 255, (side, side, 3), np.uint8)), io.BytesIO()
            image.save(content, "PNG")
            (folder / name / f"{number}.png").write_bytes(content.getvalue())
    return folder


@pytest.mark.parametrize("folders", [("a", "b", "c"), ("train/a", "train/b", "test/a", "test/b")])
def test_any_image_folder_is_a_scaling_task(tmp_path: Path, folders: tuple[str, ...]) -> None:
    task = task_named("image_scaling", write_images(tmp_path / "own", *folders))
    count = 40 * len(folders)
    splits = task.load(generator())
    assert task.input_shape == (3, 8, 8)
    assert task.classes == (3 if "a" in folders else 2)
    assert [len(splits.train), len(splits.validation)] == [count - count // 32 - count // 4, count // 32]
    small = replace(task, horizon=2, budget=10**8)
    assert np.isfinite(started(small).step(np.array(CANONICAL_ACTION)).train_loss)
    assert list(sizes_of(task)) == [1, 2, 3, 4, 5, 6]


def test_any_text_file_is_a_scaling_task_by_the_byte(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_text("Größe und Maß, Übung und Öl.\n" * 4000)
    splits = task_named("text_scaling", path).load(generator())
    assert int(splits.train.inputs.max()) == 0xC3


def test_an_image_folder_with_one_class_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has images of one class; put one folder for each of two or more"):
        task_named("image_scaling", write_images(tmp_path / "own", "only"))


def test_a_text_shorter_than_a_context_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_text("too short")
    with pytest.raises(DataError, match="a text of 9 bytes is too short; in windows of 64 bytes"):
        task_named("text_scaling", path).load(generator())


def test_a_task_with_its_own_data_refuses_data(tmp_path: Path) -> None:
    with pytest.raises(
        EsperError, match=r"'vit_scaling' has its own data .* choose text_scaling or image_sca"
    ):
        task_named("vit_scaling", tmp_path)
