"""Public calls that are interrupted at any line, or fail in the user's code."""

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import esper
from esper.kasmina import dry_run
from esper.leyline.errors import EsperError
from tests.growth.interrupts import BATCHES, Trial, differences, faults_of_plain, interrupted

LINES = {
    "init": 14,
    "bind": 14,
    "follow": 14,
    "germinate": 18,
    "prune": 14,
    "fossilize": 10,
    "set_alpha": 10,
    "raise_rank": 18,
    "incubate": 10,
    "end_epoch": 18,
    "rollback": 14,
    "measure": 14,
    "finish": 16,
    "load_state_dict": 14,
    "load": 12,
    "plant": 14,
    "diagnose": 4,
}
"""Number of interrupted lines of each public call."""
GROWS = {"grow": 20, "incubated_grow": 12, "resumed_grow": 10}


assert sum(LINES.values()) + sum(GROWS.values()) == 270


def spread(total: int, count: int) -> Iterator[tuple[int, bool]]:
    """Yield evenly spread line numbers; True is for a SIGINT, False for an exception raised in the line."""
    for i in range(count):
        yield 1 + total * (2 * i + 1) // (2 * count), i % 2 == 0


@pytest.mark.filterwarnings("ignore::esper.growth.GrowthWarning")  # A rollback issues this warning.
@pytest.mark.parametrize("call", LINES)
def test_public_call_interrupted_at_any_line_happens_completely_or_not_at_all(
    call: str, tmp_path: Path
) -> None:
    trial = Trial(call, tmp_path)
    before = trial.state()
    with interrupted(-1) as lines:
        trial.call()
    done = trial.state()
    for line, signalled in spread(lines[0], LINES[call]):
        trial = Trial(call, tmp_path)
        try:
            with interrupted(line, signalled=signalled):
                trial.call()
        except KeyboardInterrupt:
            left = trial.state()
        else:
            left = done  # The call ended before this line, because caches are filled.
        if differences(left, done):
            assert differences(left, before) == [], f"line {line}, {signalled=}"
            trial.optimizer.zero_grad()
            trial.call()
            assert differences(trial.state(), done) == [], f"repeated after line {line}, {signalled=}"


@pytest.mark.parametrize("call", GROWS)
def test_grow_interrupted_at_any_line_leaves_a_plain_network_that_can_be_grown_again(
    call: str, tmp_path: Path
) -> None:
    trial = Trial(call, tmp_path)
    with interrupted(-1) as lines:
        trial.call()
    for line, signalled in spread(lines[0], GROWS[call]):
        trial = Trial(call, tmp_path)
        try:
            with interrupted(line, signalled=signalled):
                trial.call()
        except KeyboardInterrupt:
            pass
        assert faults_of_plain(trial) == [], f"line {line}, {signalled=}"
    loss = nn.functional.cross_entropy
    esper.grow(
        trial.net, BATCHES, BATCHES, loss=loss, optimizer=trial.optimizer, epochs=1, controller=None, show=len
    )
    assert faults_of_plain(trial) == []


@pytest.mark.parametrize("failing", range(1, 16, 2))
def test_network_whose_forward_fails_once_in_grow_can_be_grown_afterwards(
    failing: int, tmp_path: Path
) -> None:
    trial = Trial("grow", tmp_path)
    calls = 0

    def fail_once(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise ZeroDivisionError

    handle = trial.net.register_forward_hook(fail_once)
    with pytest.raises((ZeroDivisionError, EsperError)):
        trial.call()
    handle.remove()
    assert faults_of_plain(trial) == []
    trial.call()
    assert faults_of_plain(trial) == []


def test_interrupt_before_the_fused_path_is_switched_on_again_does_not_leave_it_off(tmp_path: Path) -> None:
    """The ``finally`` of ``layer_by_layer`` is entered, and its only line is interrupted."""
    source, first = inspect.getsourcelines(dry_run.layer_by_layer)
    [offset] = [i for i, line in enumerate(source) if "set_fastpath_enabled(before)" in line]

    def look(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line" and frame.f_lineno == first + offset:
            sys.settrace(None)
            raise KeyboardInterrupt
        return look

    for call in ("init", "grow"):
        trial = Trial(call, tmp_path)
        sys.settrace(lambda frame, *_: look if frame.f_code.co_filename == dry_run.__file__ else None)
        try:
            with pytest.raises(KeyboardInterrupt):
                trial.call()
        finally:
            sys.settrace(None)
        assert torch.backends.mha.get_fastpath_enabled(), call
