"""Share of a rollout's CPU time that is not spent on training or validation of hosts."""

from pathlib import Path

import pytest

from benchmarks.rollout import NUM_ENVS, Rollout, Stopwatch
from benchmarks.timing import figure
from esper.kasmina.recorder import Recorder
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.simic.training import policy_env
from esper.tamiyo.policy.features import Observer
from esper.tolaria import host_training as engine

LIMIT = 0.15
HOST_WORK = ("training", "validation")


def bench_all_but_training_and_validation_takes_at_most_15_percent_of_an_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measure the CPU time of one episode of 16 hosts under an untrained policy. All telemetry rows are
    written; fixed numbers replace the scores of the twins (hosts without growth).
    """
    rollout = Rollout.prepare(tmp_path / "run", monkeypatch)
    watch = Stopwatch()
    score_samples = engine.score_samples
    monkeypatch.setattr(engine, "score_samples", lambda *args: watch.wrap("validation", score_samples(*args)))
    for name, owner, function in (
        ("training", engine.HostTraining, "begin_epoch"),
        ("training", engine.HostTraining, "train_minibatch"),
        ("policy", rollout.policy, "get_action"),
        ("observation and masks", Observer, "observe"),
        ("rewards", policy_env.GrowthEnv, "_rewards"),
        ("buffer", TamiyoRolloutBuffer, "add"),
        ("buffer", TamiyoRolloutBuffer, "add_next_value"),
        ("buffer", TamiyoRolloutBuffer, "add_outcome"),
        ("rows", Recorder, "emit"),
    ):
        monkeypatch.setattr(owner, function, watch.wrap(name, getattr(owner, function)))

    total = rollout.run(monkeypatch, watch)

    shares = {name: seconds / total for name, seconds in watch.seconds.items()}
    shares["births, actions and everything else"] = 1.0 - sum(shares.values())
    rest = 1.0 - sum(shares[name] for name in HOST_WORK)
    figure(
        f"not training or validation, in an episode of {NUM_ENVS} hosts on digits",
        100 * rest,
        "%",
        at_most=100 * LIMIT,
        note=f"of {total:.1f} s " + ", ".join(f"{name} {share:.2%}" for name, share in shares.items()),
    )
