"""Recovery from a breakdown: the seed that caused the breakdown is pruned, or a snapshot is restored."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from esper.kasmina.contributions import Contributions, attribute
from esper.kasmina.governor import Alarm, Governor
from esper.kasmina.recovery import SNAPSHOT_EVERY, Recovery, UserTraining
from esper.leyline import BlueprintAction, LifecycleOp, Stage, StageMove
from esper.leyline.errors import HostError
from esper.leyline.rows import AlertRow, EpisodeRow, EpochRow, TransitionRow
from esper.tolaria.env import MorphEnv
from tests.tolaria.building import (
    WAIT,
    action,
    bits,
    cnn,
    grown_model,
    host_tensors,
    plant,
    run,
    set_stage,
    stages_of,
    started,
    tiny_task,
)


def poison_host(env: MorphEnv) -> None:
    """Set one weight of the host to NaN."""
    with torch.no_grad():
        next(env.model.host.parameters()).view(-1)[0] = math.nan


def state_of(env: MorphEnv) -> Any:
    """Return weights, optimiser state and stages of an environment as bytes; random streams are left out."""
    model = env.model.state()
    table = {name: model["table"][name] for name in ("stage", "alpha", "seed_id", "blueprint", "age")}
    slots = [{name: value for name, value in slot.items() if name != "stream"} for slot in model["slots"]]
    return bits(
        {"host": model["host"], "slots": slots, "table": table, "own": env.host.optimiser.state_dict()}
    )


def stop_training(env: MorphEnv) -> None:
    """Disable training in later epochs, so that the restored state can be compared."""
    env.host.train_minibatch = lambda *batch: None  # type: ignore[method-assign]


def test_non_finite_host_is_rolled_back_to_the_last_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    env, sink = started(tiny_task(horizon=12))
    seen = []
    measure = env.host.measuring
    monkeypatch.setattr(env.host, "measuring", lambda **how: (seen.append(state_of(env)), measure(**how))[1])
    run(env, {0: plant(1), SNAPSHOT_EVERY: plant(0)}, until=SNAPSHOT_EVERY + 2)
    poison_host(env)
    facts = env.step(WAIT)
    assert facts.rolled_back
    assert facts.epoch == SNAPSHOT_EVERY + 3, "a rollback does not undo epochs"
    # The test records a state per epoch, before automatic stage changes, and one more after the rollback.
    assert [state == seen[SNAPSHOT_EVERY - 1] for state in seen[SNAPSHOT_EVERY:]] == [*[False] * 3, True]
    assert stages_of(env)[0] == Stage.DORMANT, "the seed that was planted after the snapshot is removed"
    [alert] = sink.of(AlertRow)
    assert (alert.rule, alert.hint) == ("non-finite", f"the governor rolled back to epoch {SNAPSHOT_EVERY}")
    undone = [row for row in sink.of(TransitionRow) if row.reason == "rolled back"]
    assert (0, "governor", Stage.DORMANT) in [(row.slot, row.cause, row.to_stage) for row in undone]


def test_host_and_slots_draw_from_new_random_streams_after_every_rollback() -> None:
    env, _ = started(tiny_task(horizon=12))
    run(env, {}, until=2)
    seen = []
    for _ in range(3):
        streams = env.host._host_stream, env.model.slot(0).stream
        seen.append([bits(stream.get_state()) for stream in streams])
        poison_host(env)
        env.step(WAIT)
    assert [len(set(found)) for found in zip(*seen, strict=True)] == [3, 3]


@pytest.mark.parametrize("broken", ["host", "fossil"])
def test_fossil_survives_a_rollback_because_fossilization_causes_a_snapshot(broken: str) -> None:
    env, _ = started(tiny_task(horizon=12))
    # Regular snapshots are due at epoch 6, before the seed is fossilized, and at epoch 9.
    fossilized = 2 * SNAPSHOT_EVERY
    run(env, {0: plant(1), fossilized: action(LifecycleOp.FOSSILIZE, 1)}, until=fossilized + 1)
    weights = env.model.seed_parameters(1) if broken == "fossil" else env.model.host_parameters()
    torch.nn.init.constant_(weights[0], math.nan)
    assert env.step(WAIT).rolled_back
    assert stages_of(env)[1] == Stage.FOSSILIZED
    assert env.model.is_finite(1)
    assert env._recovery._good_epoch == fossilized + 1


def test_if_a_fossil_raises_the_loss_the_network_is_rolled_back_and_no_seed_is_pruned() -> None:
    env, sink = started(tiny_task(horizon=14))
    run(env, {0: plant(2), 1: plant(0), 5: action(LifecycleOp.FOSSILIZE, 2)}, until=7)
    assert stages_of(env)[::2] == [Stage.HOLDING, Stage.FOSSILIZED]
    stop_training(env)
    with torch.no_grad():
        for weight in env.model.seed_parameters(2):
            weight.copy_(torch.linspace(-30, 40, weight.numel()).view_as(weight))
    facts = [env.step(WAIT) for _ in range(2)]
    assert [fact.rolled_back for fact in facts] == [False, True]
    assert stages_of(env)[::2] == [Stage.HOLDING, Stage.FOSSILIZED], "neither seed is pruned"
    assert [row.hint for row in sink.of(AlertRow)] == ["the governor rolled back to epoch 6"]
    assert facts[1].val_loss < facts[0].val_loss / 2


def measured(loss: float, without: dict[int, float]) -> Contributions:
    """Return measurements with the given losses, of the whole network and of the network without each
    seed."""
    losses = np.array([*without.values(), loss])
    leave_one_out = np.vstack([~np.eye(len(without), dtype=np.bool_), np.ones((1, len(without)), np.bool_)])
    return attribute(tuple(without), leave_one_out, -losses[:, None], losses, [])


@pytest.mark.parametrize(
    ("without", "pruned"),
    [
        ({0: 0.9, 1: 0.7, 2: 0.8, 3: 5.0}, 1),
        ({0: 0.7, 1: 0.9, 2: 0.8, 3: 5.0}, 0),
        ({0: 0.9, 1: 0.8, 2: 0.7, 3: 5.0}, 2),
        ({0: 0.9, 1: 4.0, 2: 4.0, 3: 0.1}, 0),
        ({0: 4.0, 1: 4.0, 2: 4.0, 3: 0.1}, None),
    ],
    ids=[
        "second suspect has the lowest loss",
        "first suspect has the lowest loss",
        "last suspect has the lowest loss",
        "removal of the fossil would give the lowest loss",
        "only the removal of the fossil would help",
    ],
)
def test_recovery_prunes_the_live_seed_whose_removal_gives_the_lowest_loss_or_rolls_back_if_none_helps(
    without: dict[int, float], pruned: int | None
) -> None:
    seeds = dict.fromkeys(range(4), BlueprintAction.NORM)
    model, _ = grown_model(seeds, host=cnn((2, 4, 4, 4)), stage=Stage.HOLDING)
    set_stage(model, 3, Stage.FOSSILIZED)
    moves: list[StageMove] = []
    training = UserTraining(model, moves.extend, lambda: measured(5.0, without))
    recovery = Recovery(training, Governor())
    for epoch, loss in enumerate((2.0, 1.5, 1.2, 1.0)):
        assert not recovery.check_epoch(measured(loss, {}), epoch, broken=False)
    # The first epoch with a bad loss raises no alarm, the second raises the alarm.
    assert not recovery.check_epoch(measured(5.0, without), 4, broken=False)
    assert recovery.check_epoch(measured(5.0, without), 5, broken=False)
    [intervention] = recovery.interventions()
    assert recovery.rolled_back == (pruned is None)
    assert intervention.alarm.kind == "divergence"
    if pruned is None:
        assert intervention.answer == "rolled back to epoch 3"
        return
    assert intervention.answer == f"pruned r0c{pruned}"
    assert (moves[0].slot, moves[0].target) == (pruned, Stage.PRUNED)
    assert model.blended == [slot for slot in range(4) if slot != pruned]
    assert recovery.interventions() == [], "interventions are returned once"


def test_third_rollback_ends_the_episode() -> None:
    env, sink = started(tiny_task(horizon=12))
    for number in (1, 2, 3):
        assert not env.ended
        poison_host(env)
        facts = env.step(WAIT)
        assert facts.rolled_back
        assert facts.ended == (number == 3)
    report = env.finish()
    assert report.cut_short
    assert (report.rollbacks, len(report.val_scores)) == (3, 4)
    [episode] = sink.of(EpisodeRow)
    assert (episode.ended_by, episode.rollbacks, episode.epoch) == ("governor", 3, 3)
    assert math.isfinite(report.test_score)
    with pytest.raises(RuntimeError, match="episode has ended"):
        env.step(WAIT)


def test_live_seed_that_raises_the_loss_is_pruned_without_a_rollback() -> None:
    env, sink = started(tiny_task(horizon=14, batches_per_epoch=1))
    run(env, {0: plant(2), 1: plant(0)}, until=7)
    assert stages_of(env)[0] == stages_of(env)[2] == Stage.HOLDING
    stop_training(env)
    with torch.no_grad():
        for weight in env.model.seed_parameters(2):
            weight.copy_(torch.linspace(-30, 40, weight.numel()).view_as(weight))
    host = bits(host_tensors(env.model))
    facts = [env.step(WAIT) for _ in range(2)]
    assert not any(fact.rolled_back for fact in facts)
    [alert] = sink.of(AlertRow)
    assert alert.hint == "the governor pruned r0c2"
    assert alert.rule in ("collapse", "divergence")
    assert (alert.value or 0.0) > (alert.limit or math.inf)
    assert stages_of(env)[0] == Stage.HOLDING, "the seed that did not raise the loss is kept"
    assert facts[-1].val_loss < facts[0].val_loss / 2, "the network is measured again without the pruned seed"
    assert bits(host_tensors(env.model)) == host


def test_snapshot_after_an_epoch_with_a_bad_loss_is_postponed(monkeypatch: pytest.MonkeyPatch) -> None:
    env, _ = started(tiny_task(horizon=14))
    run(env, {}, until=SNAPSHOT_EVERY - 1)
    with monkeypatch.context() as patch:
        patch.setattr(env._recovery._governor, "trouble_with", lambda loss: Alarm("divergence", loss, 0.0))
        env.step(WAIT)
    assert env._recovery._good_epoch == 0, "a snapshot was due, but the epoch was bad"
    env.step(WAIT)
    assert env._recovery._good_epoch == SNAPSHOT_EVERY + 1


def test_load_state_refuses_non_finite_states_and_states_of_another_host_and_changes_no_tensor() -> None:
    env, _ = started(tiny_task(horizon=12))
    run(env, {0: plant(1)}, until=4)
    kept = env.model.state()
    run(env, {}, until=6)
    before = bits(env.model.state())
    spoilt = {name: value * math.nan for name, value in kept["host"].items()}
    foreign = {f"other.{name}": value for name, value in kept["host"].items()}
    for host, sentence in ((spoilt, "not finite"), (foreign, "belongs to another host; different")):
        with pytest.raises(HostError, match=sentence):
            env.model.load_state({**kept, "host": host})
        assert bits(env.model.state()) == before


def test_rollback_does_not_reduce_the_ledgers_flops_and_counts_removed_seeds_as_pruned() -> None:
    env, sink = started(tiny_task(horizon=12))
    run(env, {0: plant(1), SNAPSHOT_EVERY: plant(0)}, until=SNAPSHOT_EVERY + 2)
    spent, total = env.host.meter.state()["spent"], env.host.meter.ledger.total
    poison_host(env)
    env.step(WAIT)
    assert env.host.meter.ledger.total > total
    assert env.host.meter.state()["spent"].keys() == {1}
    assert env.host.meter.state()["spent"][1] > spent[1] > 0, "the FLOPs of the seed that stayed are kept"
    assert total > env.host.meter.ledger.pruned_seeds >= spent[0] > 0, (
        "the FLOPs of the removed seed count as pruned"
    )
    assert [row.epoch for row in sink.of(EpochRow)] == list(range(1, SNAPSHOT_EVERY + 4))
