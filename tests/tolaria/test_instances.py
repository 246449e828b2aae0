"""Instances: host, training settings and slots that an episode draws from the distribution of its task."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from esper.leyline.errors import HostError, SlotError
from esper.tolaria.env import MorphEnv
from esper.tolaria.seeding import EpisodeStreams
from esper.tolaria.tasks import TASKS
from esper.tolaria.tasks.spec import InstanceDistribution
from tests.tolaria.building import tiny_task

VARIED = InstanceDistribution(
    widths=((2, 4, 4), (4, 4, 8)),
    kernels=(1, 3),
    learning_rates=(0.02, 0.05),
    rents=(0.001, 0.01),
    data_shares=(0.5, 1.0),
    vary_slots=True,
    budget_shares=(0.25, 1.0),
    batch_sizes=(None, 8, 16),
)


def generator(rng_seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(rng_seed)


def test_drawn_task_instances_cover_every_value_of_the_distribution_and_no_other() -> None:
    stream = generator()
    drawn = [VARIED.draw(stream) for _ in range(400)]
    assert {instance.widths for instance in drawn} == set(VARIED.widths)
    for name in ("kernel", "learning_rate", "rent", "data_share", "budget_share", "batch_size"):
        assert {getattr(instance, name) for instance in drawn} == set(getattr(VARIED, f"{name}s")), name
    subsets = {instance.enabled for instance in drawn}
    assert len(subsets) == 7, "every subset of three slots but the empty one"
    assert (False, False, False) not in subsets


@pytest.mark.parametrize("name", ["digits_impaired", "fashion14_impaired", "pycode", "fashion", "cifar"])
def test_instances_of_a_built_in_task_are_all_equal_or_vary_in_every_field(name: str) -> None:
    drawn = [TASKS[name].instances.draw(generator(rng_seed)) for rng_seed in range(200)]
    if name not in ("fashion", "cifar"):
        assert len(set(drawn)) == 1
        return
    for field in ("widths", "learning_rate", "enabled", "rent", "data_share"):
        assert len({getattr(instance, field) for instance in drawn}) > 1, field


def test_task_digits_mixture_has_log_uniform_budgets_that_suffice_for_every_host() -> None:
    mixture = TASKS["digits_mixture"]
    shares = mixture.instances.budget_shares
    assert shares[0] / shares[-1] == pytest.approx(32.0)
    ratios = {round(larger / smaller, 9) for larger, smaller in pairwise(shares)}
    assert ratios == {round(2 ** (1 / 3), 9)}
    for widths in mixture.instances.widths:
        dearest = replace(mixture.instances, widths=(widths,), kernels=(3,), budget_shares=shares[-1:])
        facts = MorphEnv(replace(mixture, instances=dearest), rng_seed=0).reset()
        assert facts.minibatches_left >= mixture.horizon
    env = MorphEnv(mixture, rng_seed=0)
    env.reset()
    assert [env.action_space.blueprint_names[index] for index in env.action_space.blueprints] == [
        "conv_light"
    ]


def test_episode_uses_host_widths_learning_rate_slots_and_data_share_of_its_instance() -> None:
    env = MorphEnv(replace(tiny_task(), instances=VARIED), rng_seed=0)
    seen = set()
    for episode in range(12):
        env.reset(episode)
        drawn = env.host.instance
        assert tuple(site.width for site in env.model.sites) == drawn.widths
        assert env.host.optimiser.param_groups[0]["lr"] == drawn.learning_rate
        assert tuple(env.table.enabled[0]) == drawn.enabled
        assert len(env.host.splits.train) == 128 * drawn.data_share
        assert len(env.host.splits.validation) == 48
        seen.add(drawn)
    assert len(seen) > 6


def test_task_instance_that_enables_none_of_the_requested_slots_is_refused() -> None:
    task = replace(tiny_task(), instances=replace(VARIED, widths=((2, 4, 4),)))
    env = MorphEnv(task, rng_seed=0, enabled=(True, False, False))
    drawn = [task.instances.draw(EpisodeStreams(0, 0, e).generator("instance")).enabled[0] for e in range(20)]
    env.reset(drawn.index(True))
    with pytest.raises(SlotError, match="enables none of the slots that were asked for; ask for all slots"):
        env.reset(drawn.index(False))


def test_task_with_hosts_of_two_depths_is_refused() -> None:
    mixed = InstanceDistribution(widths=((2, 4), (2, 4, 4)))
    with pytest.raises(HostError, match=r"must have one number of blocks; found \[2, 3\]"):
        replace(tiny_task(), instances=mixed)
