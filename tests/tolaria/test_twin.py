import numpy as np

from esper.leyline import Stage
from esper.leyline.protocols import Decisions
from esper.tolaria.episode import run_episode
from esper.tolaria.twin import run_without_growth
from esper.tolaria.vector import SerialVector
from tests.tolaria.building import WAIT, host_bits, plant, run, started, tiny_task

TASK = tiny_task(horizon=6, batches_per_epoch=2)


class Waiting:
    """Does nothing, and counts how often it was asked."""

    name = "waiting"

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def reset(self, episode: int) -> None:
        self.asked.clear()

    def decide(self, facts, table):  # type: ignore[no-untyped-def]
        self.asked.append(facts.epoch.tolist())
        return Decisions(np.tile(WAIT, (table.num_envs, 1)))


def test_the_twin_is_the_episode_in_which_nobody_acts() -> None:
    vector = SerialVector(TASK, rng_seed=4, env_indices=[0, 3])
    controller = Waiting()
    reports = run_episode(vector, controller, episode=2)
    assert controller.asked == [[epoch, epoch] for epoch in range(6)], "asked once before each epoch"
    for env, report in zip((0, 3), reports, strict=True):
        assert run_without_growth(TASK, rng_seed=4, env=env, episode=2) == report


def test_the_twin_shares_host_and_data_with_an_episode_that_grows() -> None:
    grown, _ = started(TASK)
    idle, _ = started(TASK)
    # Two epochs of incubation do not touch the host; what follows does.
    for epoch, shared in ((0, True), (1, True), (2, True), (3, False)):
        assert (host_bits(grown) == host_bits(idle)) == shared
        run(grown, {0: plant(1)}, until=epoch + 1)
        run(idle, {}, until=epoch + 1)
    twin = run_without_growth(TASK, rng_seed=0)
    assert twin.val_scores[0] == grown._val_scores[0], "the same untrained host on the same validation part"
    assert list(twin.val_scores[:4]) == idle._val_scores[:4]
    assert [name for name, spent in twin.flops.items() if spent] == ["forward", "backward", "validation"]


def test_an_episode_commits_every_environment_and_reads_the_test_part_once() -> None:
    class Planting(Waiting):
        def decide(self, facts, table):  # type: ignore[no-untyped-def]
            return Decisions(np.stack([plant(1) if epoch == 0 else WAIT for epoch in facts.epoch]))

    vector = SerialVector(TASK, rng_seed=0, env_indices=range(2))
    reports = run_episode(vector, Planting())
    assert vector.table.stage.tolist() == [[Stage.DORMANT, Stage.FOSSILIZED, Stage.DORMANT]] * 2
    assert all(report.params > report.host_params for report in reports)
    # A second episode begins with fresh hosts and a locked test part.
    again = run_episode(vector, Waiting(), episode=1)
    assert [report.params for report in again] == [report.host_params for report in reports]
