"""Trainings by ``esper.grow`` that are killed in random batches, damaged and resumed, in any order.

Oracle: the same training without a kill.
"""

import shutil
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch import Tensor, nn

import esper
from esper.leyline.errors import EsperError
from esper.run.checkpoint_file import CHECKPOINT
from tests.growth.interrupts import differences, state_of
from tests.growth.test_grow import loader, network
from tests.integration.training import everything_in, rows_without_times

EPOCHS = 5
CONTROLLERS = ("mlp@0:1,lora@3:3", "norm@0:2", "saturation")


class KilledError(BaseException):
    """End of a process at an arbitrary moment."""


def train(run: Path, controller: str, incubation_epochs: int, dies_at: int = 0) -> dict[str, Any]:
    """Train in a new process, from the checkpoint in ``run`` if there is one; return the state at the end.

    Args:
        run: Run directory; if the process dies, the directory is as the process has left it.
        controller: Argument of ``esper.grow``.
        incubation_epochs: Argument of ``esper.grow``.
        dies_at: Number of the batch, of training or validation, in which the process dies; 0 for none.

    Raises:
        KilledError: The process died.
        EsperError: The training cannot be resumed; network, optimiser and files are unchanged.
    """
    batches, left = 0, run.with_name("left")

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal batches
        batches += 1
        if batches == dies_at:
            shutil.copytree(run, left)
            raise KilledError
        return nn.functional.cross_entropy(output, target)

    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    resumed = (run / CHECKPOINT).exists()
    if not resumed:  # The last process died before its first checkpoint.
        shutil.rmtree(run, ignore_errors=True)
    torch.manual_seed(99 if resumed else 2)
    before, files = state_of([net], optimizer, None), everything_in(run)
    try:
        grown = esper.grow(
            net,
            loader(128),
            loader(64),
            loss=loss,
            epochs=EPOCHS,
            optimizer=optimizer,
            slots=["0", "3"],
            controller=controller,
            cost="flops",
            incubation_epochs=incubation_epochs,
            out=run,
            resume=resumed,
            show=lambda _: None,
        )
    except KilledError:
        shutil.rmtree(run)
        left.rename(run)
        raise
    except EsperError:
        assert differences(state_of([net], optimizer, None), before) == []
        assert everything_in(run) == files
        raise
    losses = [(repr(epoch.train_loss), epoch.val_loss, epoch.flops) for epoch in grown.epochs]
    rows, flops = rows_without_times(run), grown.ledger.flops()
    return state_of([net], optimizer, None) | {"losses": losses, "rows": rows, "flops": flops}


@cache
def undisturbed(controller: str, incubation_epochs: int) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        return train(Path(folder, "run"), controller, incubation_epochs)


class Kills(RuleBasedStateMachine):
    """One training in one run directory, in a process after the other."""

    @initialize(controller=st.sampled_from(CONTROLLERS), incubation_epochs=st.sampled_from([0, 1]))
    def begin(self, controller: str, incubation_epochs: int) -> None:
        self.setting = controller, incubation_epochs
        self.folder = TemporaryDirectory()
        self.run = Path(self.folder.name, "run")
        self.is_finished = False

    @rule(batch=st.integers(1, 40))
    @precondition(lambda self: not self.is_finished)
    def kill(self, batch: int) -> None:
        """Start a process that dies in a batch, unless the training ends before."""
        with suppress(KilledError):
            self.compare(train(self.run, *self.setting, dies_at=batch))

    @rule()
    def resume(self) -> None:
        self.compare(train(self.run, *self.setting))

    @rule(place=st.floats(0.0, 1.0, exclude_max=True), bit=st.integers(0, 7))
    @precondition(lambda self: (self.run / CHECKPOINT).exists())
    def damage(self, place: float, bit: int) -> None:
        """Flip a bit of the checkpoint, which is refused then; undo the damage."""
        checkpoint = self.run / CHECKPOINT
        content = checkpoint.read_bytes()
        at = int(place * len(content))
        checkpoint.write_bytes(content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :])
        with pytest.raises(EsperError, match=CHECKPOINT):
            train(self.run, *self.setting)
        checkpoint.write_bytes(content)

    def compare(self, end: dict[str, Any]) -> None:
        self.is_finished = True
        assert differences(end, undisturbed(*self.setting)) == []

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            try:
                if not self.is_finished:
                    self.resume()
            finally:
                self.folder.cleanup()


TestKills = pytest.mark.filterwarnings("ignore::esper.growth.GrowthWarning")(Kills.TestCase)
TestKills.settings = settings(max_examples=12, stateful_step_count=6, deadline=None)
