"""What an episode does when an epoch went wrong: remove the guilty seed, or return to the last good state.

A rollback brings back weights, optimisers and topology. Time and data go on, and the random streams
begin anew under the number of the rollback, so the same failure is not met again.
"""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from esper.kasmina import lifecycle
from esper.leyline.events import StageMove
from esper.leyline.slot_table import SlotTable
from esper.leyline.stages import Stage
from esper.tolaria import actuator, recording
from esper.tolaria.counterfactual import Counterfactuals
from esper.tolaria.epoch import total_norm
from esper.tolaria.governor import Alarm, Governor

if TYPE_CHECKING:
    from esper.tolaria.env import MorphEnv

SNAPSHOT_EVERY: Final = 3
"""Good epochs between snapshots; a fossilisation takes one too."""
ROLLBACK_LIMIT: Final = 3
"""The rollback that ends an episode, unless told otherwise."""


class Recovery:
    """Watches over one episode of an environment."""

    def __init__(self, env: MorphEnv, limit: int) -> None:
        """The episode begins; with rollback number ``limit`` it ends."""
        self._env = env
        self._limit = limit
        self._governor = Governor(env.guess_loss)
        self.rollbacks = 0
        self.rolled_back = False
        """In the epoch under way."""
        self._fossilized = False
        self._keep()

    @property
    def given_up(self) -> bool:
        """There were too many rollbacks."""
        return self.rollbacks >= self._limit

    def note_fossil(self) -> None:
        """What became permanent must survive a rollback."""
        self._fossilized = True

    def judge(self, measured: Counterfactuals, *, broken: bool) -> Counterfactuals:
        """Judge the epoch; returns what holds at its end, measured again if something was undone.

        ``broken`` says that the training itself met numbers that are not finite, without a culprit.
        """
        self.rolled_back = False
        alarm = Alarm("non-finite", math.nan, math.inf) if broken else self._governor.judge(measured.loss)
        if alarm is None:
            if not self._governor.suspicious:
                self._keep_if_due()
            return measured
        guilty = None if broken else self._guilty(measured)
        if guilty is None:
            self._roll_back(alarm)
        else:
            self._prune(guilty, str(alarm), alarm)
        self._governor.forgive()
        return self._env.measure()

    # --- snapshots ----------------------------------------------------------------------------

    def _keep_if_due(self) -> None:
        if self._fossilized or self._env.epoch - self._good["epoch"] >= SNAPSHOT_EVERY:
            self._keep()

    def _keep(self) -> None:
        env = self._env
        self._good: dict[str, Any] = {
            "epoch": env.epoch,
            "model": env.model.state(),
            "optimiser": copy.deepcopy(env.optimiser.state_dict()),
        }
        self._fossilized = False

    def _roll_back(self, alarm: Alarm) -> None:
        env = self._env
        self.rollbacks += 1
        self.rolled_back = True
        before = env.table.copy()
        env.model.load_state(self._good["model"])
        env.optimiser.load_state_dict(copy.deepcopy(self._good["optimiser"]))
        env.begin_streams("rollback", str(self.rollbacks))
        same = (before.seed_id == env.table.seed_id) & env.table.occupied
        env.meter.follow_model(same[0].nonzero()[0].tolist())
        recording.emit_moves(env, _undone(before, env.table))
        recording.emit_alert(env, alarm, f"rolled back to epoch {self._good['epoch']}")

    def state(self) -> dict[str, Any]:
        """All that a snapshot of the environment needs to know of this."""
        return {"rollbacks": self.rollbacks, "good": self._good, "governor": self._governor.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        self.rollbacks, self._good = state["rollbacks"], state["good"]
        self._governor.load_state(state["governor"])
        self.rolled_back = self._fossilized = False

    # --- the guilty ---------------------------------------------------------------------------

    def _guilty(self, measured: Counterfactuals) -> int | None:
        """The live seed without which the loss would be the best, if that were a healthy one."""
        live = [slot for slot in measured.slots if self._env.table.live[0, slot]]
        without = {slot: measured.loss_without(slot) for slot in live}
        healthy = {s: loss for s, loss in without.items() if self._governor.trouble_with(loss) is None}
        return min(healthy, key=lambda slot: healthy[slot]) if healthy else None

    def remove_broken(self, slots: list[int]) -> None:
        """Incubating seeds are no longer finite; the host has not noticed."""
        for slot in slots:
            self._prune(slot, "non-finite while incubating")

    def remove_guilty(self, x: Tensor, y: Tensor) -> bool:
        """A minibatch was not finite: remove the live seeds behind it, if there are any."""
        guilty = [slot for slot in self._env.model.blended if self._explains(slot, x, y)]
        for slot in guilty:
            self._prune(slot, "non-finite while blended")
        return bool(guilty)

    def _explains(self, slot: int, x: Tensor, y: Tensor) -> bool:
        """Whether the live seed at ``slot`` is broken, or loss and gradient would be finite without it."""
        model, objective = self._env.model, self._env.task.objective
        if not self._env.table.live[0, slot]:
            return False
        if not model.is_finite(slot):
            return True
        alphas = model.live_alphas
        alphas[slot] = None
        model.eval()
        without = objective.loss(model(x, alphas), y)
        trained = [p for p in model.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(without, trained, materialize_grads=True)
        model.train()
        return math.isfinite(without.item()) and math.isfinite(total_norm(list(gradients)))

    def _prune(self, slot: int, reason: str, alarm: Alarm | None = None) -> None:
        env = self._env
        moves = lifecycle.prune(env.table, 0, slot, env.model.rules, cause="governor", reason=reason)
        actuator.settle(env.model, moves)
        env.book(moves)
        slot_id = env.model.slot_config.slot_ids[slot]
        recording.emit_alert(env, alarm or Alarm("non-finite", math.nan, math.inf), f"pruned {slot_id}")


def _undone(before: SlotTable, after: SlotTable) -> list[StageMove]:
    """What a rollback did to the slots: each that is not as it was, from the stage it had."""
    changed = (before.stage != after.stage) | (before.seed_id != after.seed_id)
    return [
        StageMove(
            env=0,
            slot=slot,
            seed_id=int((after if after.occupied[0, slot] else before).seed_id[0, slot]),
            blueprint=int((after if after.occupied[0, slot] else before).blueprint[0, slot]),
            origin=Stage(int(before.stage[0, slot])),
            target=Stage(int(after.stage[0, slot])),
            cause="governor",
            reason="rolled back",
            verdict=None,
            age=int(after.age[0, slot]),
            contribution=float(after.contribution[0, slot]),
        )
        for slot in changed[0].nonzero()[0].tolist()
    ]
