"""Hosts with any number of slots, and policies with and without room for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from esper.karn.query import read_rows
from esper.leyline.events import EpisodeRow, RunRow
from esper.scripts import cli
from esper.tamiyo.policy.checkpoint import load_policy
from esper.training import train
from tests.integration.training import sentence_of, tiny

pytestmark = pytest.mark.usefixtures("cache")


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 5, 8])
def test_hosts_with_any_number_of_slots_are_trained(slots: int, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(tiny(slots=slots, iterations=1), out)
    assert load_policy(out / "best").num_slots == slots
    assert len(read_rows(out, RunRow)[0].slots) == slots


def test_a_policy_with_room_for_eight_slots_grows_a_host_with_three(tmp_path: Path) -> None:
    train(tiny(capacity=8, iterations=1), tmp_path / "run")
    best = str(tmp_path / "run" / "best")
    words = ["run", "--task", "tiny", "--controller", "ppo", "--checkpoint", best, "--steps", "4"]
    cli.main([*words, "--out", str(tmp_path / "grown")])
    assert load_policy(best).num_slots == 8
    assert read_rows(tmp_path / "grown", RunRow)[0].slots == ["r0c0", "r0c1", "r0c2"]
    assert len(read_rows(tmp_path / "grown", EpisodeRow)) == 1


def test_a_policy_without_room_for_all_slots_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny(slots=2, iterations=1), tmp_path / "run")
    best = str(tmp_path / "run" / "best")
    said = sentence_of(capsys, "run", "--task", "tiny", "--controller", "ppo", "--checkpoint", best)
    assert "a policy with room for 2 slots cannot serve a host with 3" in said
