"""An episode that goes wrong: the guilty seed goes, or the last good state comes back."""

import math
from typing import Any

import pytest
import torch

from esper.kasmina.governor import Alarm
from esper.kasmina.recovery import SNAPSHOT_EVERY
from esper.leyline import LifecycleOp, Stage
from esper.leyline.errors import HostError
from esper.leyline.rows import AlertRow, EpisodeRow, EpochRow, TransitionRow
from esper.tolaria.env import MorphEnv
from esper.tolaria.epoch import EpochTraining
from tests.tolaria.building import WAIT, action, bits, plant, run, stages_of, started, tiny_task


def poison_host(env: MorphEnv) -> None:
    with torch.no_grad():
        next(env.model.host.parameters()).view(-1)[0] = math.nan


def state_of(env: MorphEnv) -> Any:
    """Weights, optimisers and topology, without random streams and measurements."""
    model = env.model.state()
    table = {name: model["table"][name] for name in ("stage", "alpha", "seed_id", "blueprint", "age")}
    slots = [{name: value for name, value in slot.items() if name != "stream"} for slot in model["slots"]]
    return bits(
        {"host": model["host"], "slots": slots, "table": table, "own": env.host.optimiser.state_dict()}
    )


def stop_training(env: MorphEnv) -> None:
    """From now on epochs change nothing, so what a rollback brought back can be seen."""

    def idle() -> EpochTraining:
        env.epoch += 1
        return EpochTraining(math.nan, math.nan, math.nan, 0, {})

    env.host.train_minibatch = lambda *batch: None  # type: ignore[method-assign]
    env._end_training = idle  # type: ignore[method-assign]


def test_a_broken_host_returns_to_the_last_good_state(monkeypatch: pytest.MonkeyPatch) -> None:
    env, sink = started(tiny_task(horizon=12))
    seen = []
    measure = env._measure
    monkeypatch.setattr(env, "_measure", lambda: (measure(), seen.append(state_of(env)))[0])
    run(env, {0: plant(1), SNAPSHOT_EVERY: plant(0)}, until=SNAPSHOT_EVERY + 2)
    poison_host(env)
    facts = env.step(WAIT)
    assert facts.rolled_back
    assert facts.epoch == SNAPSHOT_EVERY + 3, "time goes on"
    # One look per epoch, and one more after the rollback: measured, and nothing advanced yet.
    assert [state == seen[SNAPSHOT_EVERY - 1] for state in seen[SNAPSHOT_EVERY:]] == [*[False] * 3, True]
    assert stages_of(env)[0] == Stage.DORMANT, "what was planted since is gone"
    [alert] = sink.of(AlertRow)
    assert (alert.rule, alert.hint) == ("non-finite", f"the governor rolled back to epoch {SNAPSHOT_EVERY}")
    undone = [row for row in sink.of(TransitionRow) if row.reason == "rolled back"]
    assert (0, "governor", Stage.DORMANT) in [(row.slot, row.cause, row.to_stage) for row in undone]


def test_the_same_failure_is_not_met_again_because_the_streams_differ() -> None:
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
def test_a_fossil_survives_a_rollback_and_a_broken_one_means_one(broken: str) -> None:
    env, _ = started(tiny_task(horizon=12))
    run(env, {0: plant(1), 5: action(LifecycleOp.FOSSILIZE, 1)}, until=6)
    weights = env.model.seed_parameters(1) if broken == "fossil" else env.model.host_parameters()
    torch.nn.init.constant_(weights[0], math.nan)
    assert env.step(WAIT).rolled_back
    assert stages_of(env)[1] == Stage.FOSSILIZED
    assert env.model.is_finite(1)


def test_the_third_rollback_ends_the_episode_with_the_last_good_network() -> None:
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


def test_a_live_seed_that_ruins_the_loss_is_pruned_and_nothing_is_rolled_back() -> None:
    env, sink = started(tiny_task(horizon=14, batches_per_epoch=1))
    run(env, {0: plant(2), 1: plant(0)}, until=7)
    assert stages_of(env)[0] == stages_of(env)[2] == Stage.HOLDING
    stop_training(env)
    with torch.no_grad():
        for weight in env.model.seed_parameters(2):
            weight.copy_(torch.linspace(-30, 40, weight.numel()).view_as(weight))
    host = bits(env.model.host.state_dict())
    facts = [env.step(WAIT) for _ in range(2)]
    assert not any(fact.rolled_back for fact in facts)
    [alert] = sink.of(AlertRow)
    assert alert.hint == "the governor pruned r0c2"
    assert alert.rule in ("collapse", "divergence")
    assert (alert.value or 0.0) > (alert.limit or math.inf)
    assert stages_of(env)[0] == Stage.HOLDING, "the other one stays"
    assert facts[-1].val_loss < facts[0].val_loss / 2, "measured again without it"
    assert bits(env.model.host.state_dict()) == host


def test_a_suspicious_epoch_is_not_kept_as_a_good_state(monkeypatch: pytest.MonkeyPatch) -> None:
    env, _ = started(tiny_task(horizon=14))
    run(env, {}, until=SNAPSHOT_EVERY - 1)
    with monkeypatch.context() as patch:
        patch.setattr(env._recovery._governor, "trouble_with", lambda loss: Alarm("divergence", loss, 0.0))
        env.step(WAIT)
    assert env._recovery._good_epoch == 0, "it was due, and bad"
    env.step(WAIT)
    assert env._recovery._good_epoch == SNAPSHOT_EVERY + 1


def test_a_state_that_is_not_finite_leaves_the_model_as_it_was() -> None:
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


def test_compute_spent_on_what_was_rolled_back_is_not_undone() -> None:
    env, sink = started(tiny_task(horizon=12))
    run(env, {0: plant(1), SNAPSHOT_EVERY: plant(0)}, until=SNAPSHOT_EVERY + 2)
    spent, total = env.host.meter.state()["spent"], env.host.meter.ledger.total
    poison_host(env)
    env.step(WAIT)
    assert env.host.meter.ledger.total > total
    assert env.host.meter.state()["spent"].keys() == {1}
    assert env.host.meter.state()["spent"][1] > spent[1] > 0, "the seed that stayed keeps its account"
    assert total > env.host.meter.ledger.pruned_seeds >= spent[0] > 0, "the one that is gone does not"
    assert [row.epoch for row in sink.of(EpochRow)] == list(range(1, SNAPSHOT_EVERY + 4))
