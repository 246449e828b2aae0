"""Twin of an episode, in which no seed is planted, and whole episodes of several environments."""

import numpy as np

from esper.leyline import Stage
from esper.leyline.signals import Decisions
from esper.tolaria.episode import run_episode
from esper.tolaria.twin import run_without_growth
from esper.tolaria.vector import SerialVector
from tests.tolaria.building import WAIT, host_bits, plant, run, started, tiny_task

TASK = tiny_task(horizon=6, batches_per_epoch=2)


class Waiting:
    """Controller that always waits and records the epochs of its decisions."""

    name = "waiting"

    def __init__(self) -> None:
        self.epochs: list[list[int]] = []

    def reset(self, episode: int) -> None:
        self.epochs.clear()

    def decide(self, facts, table):  # type: ignore[no-untyped-def]
        self.epochs.append(facts.epoch.tolist())
        return Decisions(np.tile(WAIT, (table.num_envs, 1)))


def test_report_of_a_twin_equals_that_of_an_episode_in_which_the_controller_always_waits() -> None:
    vector = SerialVector(TASK, rng_seed=4, env_indices=[0, 3])
    controller = Waiting()
    reports = run_episode(vector, controller, episode=2)
    assert controller.epochs == [[epoch, epoch] for epoch in range(6)], "one decision before each epoch"
    for env, report in zip((0, 3), reports, strict=True):
        assert run_without_growth(TASK, rng_seed=4, env=env, episode=2) == report


def test_host_of_an_episode_with_growth_equals_its_twin_until_the_seed_is_blended() -> None:
    grown, _ = started(TASK)
    idle, _ = started(TASK)
    # Incubation lasts two epochs and does not change the host; blending changes the host.
    for epoch, shared in ((0, True), (1, True), (2, True), (3, False)):
        assert (host_bits(grown) == host_bits(idle)) == shared
        run(grown, {0: plant(1)}, until=epoch + 1)
        run(idle, {}, until=epoch + 1)
    twin = run_without_growth(TASK, rng_seed=0)
    assert twin.val_scores[0] == grown._val_scores[0], "the same untrained host on the same validation split"
    assert list(twin.val_scores[:4]) == idle._val_scores[:4]
    assert [name for name, spent in twin.flops.items() if spent] == ["forward", "backward", "validation"]


def test_episode_ends_with_a_commit_in_every_environment_and_the_next_starts_without_seeds() -> None:
    class Planting(Waiting):
        def decide(self, facts, table):  # type: ignore[no-untyped-def]
            return Decisions(np.stack([plant(1) if epoch == 0 else WAIT for epoch in facts.epoch]))

    vector = SerialVector(TASK, rng_seed=0, env_indices=range(2))
    reports = run_episode(vector, Planting())
    assert vector.table.stage.tolist() == [[Stage.DORMANT, Stage.FOSSILIZED, Stage.DORMANT]] * 2
    assert all(report.params > report.host_params for report in reports)
    # The second episode has new hosts and a locked test split.
    again = run_episode(vector, Waiting(), episode=1)
    assert [report.params for report in again] == [report.host_params for report in reports]
