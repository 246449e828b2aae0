"""Random schedules of growth by hand, with processes that die and files that are damaged in between.

Oracle: the operations that still count, repeated in a new process without saving, loading, kills and damage.
"""

import io
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch import nn
from torch.optim.swa_utils import AveragedModel

import esper
from esper.growth import Growth
from esper.leyline.errors import EsperError
from tests.growth.interrupts import BATCHES, X, differences, network, state_of

SLOTS = ("0", "2", "4")
BLUEPRINTS = ("mlp_small", "lora", "norm")
LEAST = 4
"""Number of operations after which a state can be loaded or a process be killed."""
STYLES = ("linear_add", "sigmoid_add", "gated_gate")


def new_network() -> nn.Module:
    """Return a new network; the random state does not change."""
    with torch.random.fork_rng():
        return network().append(nn.Dropout(0.2))


class Setting(NamedTuple):
    """Arguments of ``Growth`` that differ between schedules."""

    controller: str | None
    incubation_epochs: int


class Training:
    """Training of a new network by hand in a new process; methods without underscore are its operations."""

    def __init__(self, setting: Setting) -> None:
        self.net = new_network()
        self.average = AveragedModel(self.net)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01)
        self.growth = Growth(
            self.net,
            self.optimizer,
            sample=X[:2],
            slots=SLOTS,
            mode="min",
            follow=[self.average],
            **setting._asdict(),
        )
        torch.manual_seed(1)

    def step(self) -> None:
        """Train one epoch."""
        self.net.train()
        for x, y in BATCHES:
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.net(x), y).backward()
            self.growth.incubate(lambda x=x, y=y: nn.functional.cross_entropy(self.net(x), y))
            self.optimizer.step()
        self.average.update_parameters(self.net)
        self.growth.end_epoch(self._losses)

    def plant(self, slot: str, blueprint: str, style: str, alpha: float) -> None:
        self.growth.germinate(slot, blueprint, style=style, alpha=alpha)

    def prune(self, slot: str) -> None:
        self.growth.prune(slot)

    def set_alpha(self, slot: str, alpha: float) -> None:
        self.growth.set_alpha(slot, alpha)

    def fossilize(self, slot: str) -> None:
        self.growth.fossilize(slot)

    def finish(self) -> None:
        self.growth.finish()

    @torch.no_grad()
    def _losses(self) -> list[float]:
        self.net.eval()
        return [nn.functional.cross_entropy(self.net(x), y).item() for x, y in BATCHES]

    @torch.no_grad()
    def outputs(self) -> list[torch.Tensor]:
        """Return the outputs of the network and of its average."""
        modes = self.net.training, self.average.training
        found = [net.eval()(X) for net in (self.net, self.average)]
        self.net.train(modes[0])
        self.average.train(modes[1])
        return found

    def state(self) -> dict[str, Any]:
        state = state_of([self.net, self.average], self.optimizer, self.growth)
        return state | dict(zip(("output", "average output"), self.outputs(), strict=True))

    # --- state of the process --------------------------------------------------------------------------

    def checkpoint(self) -> bytes:
        """Return everything from which a user continues a training, as the content of a file."""
        parts = {name: getattr(self, name).state_dict() for name in ("growth", "net", "average", "optimizer")}
        file = io.BytesIO()
        torch.save({**parts, "random": torch.get_rng_state()}, file)
        return file.getvalue()

    def load(self, checkpoint: bytes) -> None:
        state = torch.load(io.BytesIO(checkpoint), weights_only=True)
        for name in ("growth", "net", "average", "optimizer"):
            getattr(self, name).load_state_dict(state[name])
        torch.set_rng_state(state["random"])


def has_live_seed(schedule: "Schedule") -> bool:
    return not schedule.is_finished and bool(schedule.training.growth.network.table.live.any())


class Schedule(RuleBasedStateMachine):
    """Random operations on one training, compared with the same operations in an undisturbed process."""

    @initialize(
        setting=st.builds(
            Setting, st.sampled_from([None, "mlp_small@0:2,norm@2:4", "saturation"]), st.sampled_from([0, 1])
        )
    )
    def begin(self, setting: Setting) -> None:
        self.setting, self.training = setting, Training(setting)
        self.operations: list[tuple[str, tuple[Any, ...]]] = []
        self.is_finished = False
        self.since_save = self.since_load = 1
        self.folder = TemporaryDirectory()
        self.file = Path(self.folder.name) / "net.safetensors"
        self.save()

    # --- operations ------------------------------------------------------------------------------------

    def act(self, name: str, *arguments: Any) -> None:
        """Carry out an operation; one that is refused changes nothing."""
        before = self.training.state()
        try:
            getattr(self.training, name)(*arguments)
        except EsperError:
            assert differences(self.training.state(), before) == [], f"{name} was refused"
        else:
            self.operations.append((name, arguments))
            self.since_save += 1
            self.since_load += 1

    @rule(epochs=st.integers(1, 3), saved=st.booleans())
    @precondition(lambda self: not self.is_finished)
    def step(self, epochs: int, saved: bool) -> None:
        for _ in range(epochs):
            self.act("step")
        if saved:
            self.save()

    @rule(
        slot=st.sampled_from(SLOTS),
        blueprint=st.sampled_from(BLUEPRINTS),
        style=st.sampled_from(STYLES),
        alpha=st.sampled_from([0.0, 0.5, 1.0]),
    )
    @precondition(lambda self: not self.is_finished)
    def plant(self, slot: str, blueprint: str, style: str, alpha: float) -> None:
        self.act("plant", slot, blueprint, style, alpha)

    def live(self, number: int) -> str:
        """Return the name of a slot whose seed is not permanent."""
        [live] = self.training.growth.network.table.live
        names = [name for name, is_live in zip(SLOTS, live, strict=True) if is_live]
        return names[number % len(names)]

    @rule(number=st.integers(0, 2))
    @precondition(has_live_seed)
    def prune(self, number: int) -> None:
        self.act("prune", self.live(number))

    @rule(number=st.integers(0, 2), alpha=st.sampled_from([0.0, 0.25, 1.0]))
    @precondition(has_live_seed)
    def set_alpha(self, number: int, alpha: float) -> None:
        self.act("set_alpha", self.live(number), alpha)

    @rule(number=st.integers(0, 2), at_once=st.booleans())
    @precondition(has_live_seed)
    def fossilize(self, number: int, at_once: bool) -> None:
        slot = self.live(number)
        if not at_once:
            self.act("set_alpha", slot, 1.0)
        self.act("fossilize", slot)

    @rule()
    @precondition(lambda self: not self.is_finished and len(self.operations) > 5)
    def finish(self) -> None:
        self.act("finish")
        self.is_finished = True
        self.compare()

    @rule(operation=st.sampled_from([("finish",), ("prune", "0"), ("plant", "2", "norm", "linear_add", 1.0)]))
    @precondition(lambda self: self.is_finished)
    def go_on_after_finish(self, operation: tuple[Any, ...]) -> None:
        done = len(self.operations)
        self.act(*operation)
        assert len(self.operations) == done, f"{operation} was not refused"

    # --- what happens to the process and its files -----------------------------------------------------

    @rule()
    @precondition(lambda self: not self.is_finished and self.since_save > 0)
    def save(self) -> None:
        """Write all files; the saved network can be read as a plain module."""
        output = self.training.outputs()[0]
        self.checkpoint, self.saved_operations = self.training.checkpoint(), len(self.operations)
        self.training.growth.save(self.file)
        net = esper.load(self.file, base=new_network())
        assert torch.allclose(net.eval()(X), output, atol=1e-6)
        self.saved = dict(net.state_dict())
        self.since_save, self.is_damaged = 0, False

    @rule()
    @precondition(lambda self: not self.is_finished and self.since_load > LEAST)
    def load(self) -> None:
        """Return to the saved state in the same process."""
        self.continue_from_save()

    @rule()
    @precondition(lambda self: self.since_load > LEAST)
    def kill_and_resume(self) -> None:
        """Forget all objects of the process, and continue from the saved state in a new one."""
        torch.manual_seed(99)
        self.training, self.is_finished = Training(self.setting), False
        self.continue_from_save()

    def continue_from_save(self) -> None:
        self.training.load(self.checkpoint)
        del self.operations[self.saved_operations :]
        self.since_load = self.since_save = 0
        self.compare()

    @rule(place=st.floats(0.0, 1.0, exclude_max=True), bit=st.integers(0, 7))
    @precondition(lambda self: not self.is_damaged)
    def damage(self, place: float, bit: int) -> None:
        """Flip a bit of the saved network; reading it is refused, or the bit had no meaning."""
        self.is_damaged = True
        content = self.file.read_bytes()
        at = int(place * len(content))
        self.file.write_bytes(content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :])
        before, base = self.training.state(), new_network()
        state = {name: value.clone() for name, value in base.state_dict().items()}
        try:
            esper.load(self.file, base=base)
        except EsperError:
            assert differences(base.state_dict(), state) == []
        else:
            assert differences(dict(base.state_dict()), self.saved) == [], f"bit {bit} of byte {at}"
        assert differences(self.training.state(), before) == []

    # --- oracle ----------------------------------------------------------------------------------------

    def compare(self) -> None:
        """Compare the training with its operations in an undisturbed process."""
        state = self.training.state()
        undisturbed = Training(self.setting)
        for name, arguments in self.operations:
            getattr(undisturbed, name)(*arguments)
        assert differences(state, undisturbed.state()) == []
        torch.set_rng_state(state["random"])

    def teardown(self) -> None:
        if hasattr(self, "training"):
            try:
                self.compare()
            finally:
                self.folder.cleanup()


TestSchedule = pytest.mark.filterwarnings("ignore::esper.growth.GrowthWarning")(Schedule.TestCase)
TestSchedule.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
