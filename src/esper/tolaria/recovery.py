"""What happens when an epoch went wrong: the guilty seed is removed, or the last good state comes back.

A rollback brings back weights, optimisers and topology. Time and data go on, and the random streams
begin anew under the number of the rollback, so the same failure is not met again.
"""

import math
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from esper.kasmina import lifecycle
from esper.leyline.rows import StageMove
from esper.leyline.slot_table import SlotTable
from esper.leyline.stages import Stage
from esper.tolaria import actuator
from esper.tolaria.counterfactual import Counterfactuals
from esper.tolaria.governor import Alarm, Governor
from esper.tolaria.host_training import HostTraining
from esper.tolaria.minibatch import tensor_norms
from esper.tolaria.objective import Objective

SNAPSHOT_EVERY: Final = 3
"""Good epochs between snapshots; a fossilisation takes one too."""
ROLLBACK_LIMIT: Final = 3
"""The rollback that ends an episode, unless told otherwise."""
NOT_FINITE: Final = Alarm("non-finite", math.nan, math.inf)


class Intervention(NamedTuple):
    """What was found wrong, what was done about it, and the stage moves that this caused."""

    alarm: Alarm
    answer: str
    moves: list[StageMove]


class Recovery:
    """Watches over the host of one episode."""

    def __init__(self, host: HostTraining, objective: Objective, limit: int) -> None:
        """The episode begins; with rollback number ``limit`` it ends."""
        self._host = host
        self._objective = objective
        self._limit = limit
        self._governor = Governor(host.guess_loss)
        self._interventions: list[Intervention] = []
        self.rollbacks = 0
        self.rolled_back = False
        """In the epoch that was checked last."""
        self._fossilized = False
        self._keep(0)

    @property
    def given_up(self) -> bool:
        """There were too many rollbacks."""
        return self.rollbacks >= self._limit

    def note_fossil(self) -> None:
        """What became permanent must survive a rollback."""
        self._fossilized = True

    def interventions(self) -> list[Intervention]:
        """Those since the last call."""
        made, self._interventions = self._interventions, []
        return made

    def check_epoch(self, measured: Counterfactuals, epoch: int, *, broken: bool) -> bool:
        """Whether the epoch had to be undone in part or whole, so that its end must be measured again.

        ``broken`` says that the training itself met numbers that are not finite, without a culprit.
        """
        self.rolled_back = False
        alarm = NOT_FINITE if broken else self._governor.check(measured.loss)
        if alarm is None:
            due = self._fossilized or epoch - self._good_epoch >= SNAPSHOT_EVERY
            if due and not self._governor.suspicious:
                self._keep(epoch)
            return False
        guilty = None if broken else self._guilty(measured)
        if guilty is None:
            self._roll_back(alarm)
        else:
            self._prune(guilty, str(alarm), alarm)
        self._governor.forgive()
        return True

    # --- snapshots ----------------------------------------------------------------------------

    def _keep(self, epoch: int) -> None:
        self._good_epoch, self._good = epoch, self._host.weights()
        self._fossilized = False

    def _roll_back(self, alarm: Alarm) -> None:
        host, table = self._host, self._host.table
        self.rollbacks += 1
        self.rolled_back = True
        before = table.copy()
        host.load_weights(self._good)
        host.begin_streams("rollback", str(self.rollbacks))
        same = (before.seed_id == table.seed_id) & table.occupied
        host.meter.follow_model(same[0].nonzero()[0].tolist())
        answer = f"rolled back to epoch {self._good_epoch}"
        self._interventions.append(Intervention(alarm, answer, _undone(before, table)))

    def state(self) -> dict[str, Any]:
        """All that a snapshot of the environment needs to know of this."""
        return {
            "rollbacks": self.rollbacks,
            "good_epoch": self._good_epoch,
            "good": self._good,
            "governor": self._governor.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.rollbacks, self._good_epoch, self._good = state["rollbacks"], state["good_epoch"], state["good"]
        self._governor.load_state(state["governor"])
        self.rolled_back = self._fossilized = False

    # --- the guilty seed ----------------------------------------------------------------------

    def _guilty(self, measured: Counterfactuals) -> int | None:
        """The live seed without which the loss would be the best, if that were a healthy one."""
        if not measured.slots and self._host.model.blended:
            measured = self._host.measure(contributions=True)
        live = [slot for slot in measured.slots if self._host.table.live[0, slot]]
        without = {slot: measured.loss_without(slot) for slot in live}
        healthy = {s: loss for s, loss in without.items() if self._governor.trouble_with(loss) is None}
        return min(healthy, key=lambda slot: healthy[slot]) if healthy else None

    def remove_broken(self, slots: list[int]) -> None:
        """Incubating seeds are no longer finite; the host has not noticed."""
        for slot in slots:
            self._prune(slot, "non-finite while incubating")

    def remove_guilty(self, x: Tensor, y: Tensor) -> bool:
        """A minibatch was not finite: remove the live seeds behind it, if there are any."""
        guilty = [slot for slot in self._host.model.blended if self._explains(slot, x, y)]
        for slot in guilty:
            self._prune(slot, "non-finite while blended")
        return bool(guilty)

    def _explains(self, slot: int, x: Tensor, y: Tensor) -> bool:
        """Whether the live seed at ``slot`` is broken, or loss and gradient would be finite without it."""
        model = self._host.model
        if not self._host.table.live[0, slot]:
            return False
        if not model.is_finite(slot):
            return True
        alphas = model.live_alphas
        alphas[slot] = None
        model.eval()
        with self._host.precision.autocast():
            without = self._objective.loss(model(x, alphas), y)
        trained = [p for p in model.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(without, trained, materialize_grads=True)
        model.train()
        return math.isfinite(without.item()) and bool(tensor_norms(list(gradients)).isfinite().all())

    def _prune(self, slot: int, reason: str, alarm: Alarm = NOT_FINITE) -> None:
        host = self._host
        moves = lifecycle.prune(host.table, 0, slot, host.model.rules, cause="governor", reason=reason)
        actuator.settle(host.model, moves)
        host.count(moves)
        answer = f"pruned {host.model.slot_config.slot_ids[slot]}"
        self._interventions.append(Intervention(alarm, answer, moves))


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
