"""How much of a rollout is spent on anything but training and validating hosts."""

from pathlib import Path

import pytest

from benchmarks.living import NUM_ENVS, Episodes, Stopwatch
from benchmarks.measuring import figure
from esper.simic.training import growth
from esper.tamiyo.policy.observer import Observer
from esper.tolaria import env as engine
from esper.tolaria import recording

LIMIT = 0.15
HOST_WORK = ("training", "validation")


def bench_all_but_training_and_validation_takes_at_most_15_percent_of_an_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One episode of 16 hosts under an untrained policy, every row written, twins known beforehand."""
    episodes = Episodes.prepare(monkeypatch)
    watch = Stopwatch()
    for name, owner, function in (
        ("training", engine, "train_epoch"),
        ("validation", engine, "measure"),
        ("policy", episodes.policy, "get_action"),
        ("observation and masks", Observer, "observe"),
        ("rewards", growth.GrowthEnv, "_judge"),
        ("buffer", episodes.buffer, "add"),
        ("buffer", episodes.buffer, "add_next_value"),
        ("buffer", episodes.buffer, "add_outcome"),
        ("rows", recording, "emit_epoch"),
        ("rows", recording, "emit_decision"),
        ("rows", recording, "emit_moves"),
        ("rows", recording, "emit_counterfactuals"),
    ):
        monkeypatch.setattr(owner, function, watch.wrap(name, getattr(owner, function)))

    total = episodes.live(tmp_path / "run", watch)

    shares = {name: seconds / total for name, seconds in watch.seconds.items()}
    shares["births, actions and everything else"] = 1.0 - sum(shares.values())
    rest = 1.0 - sum(shares[name] for name in HOST_WORK)
    figure(
        f"an episode of {NUM_ENVS} hosts on digits, {total:.1f} s",
        f"not training or validation {rest:.1%} (limit {LIMIT:.0%}); "
        + ", ".join(f"{name} {share:.2%}" for name, share in shares.items()),
    )
    assert rest <= LIMIT
