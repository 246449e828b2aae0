"""Recovery from a broken epoch: remove the seed that caused it, or return to the last good state.

A rollback restores weights, optimisers and topology. After a rollback, time and data continue, and random
streams restart with the number of the rollback, so that the same failure is not repeated.
"""

import math
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.kasmina import actuator, lifecycle
from esper.kasmina.contributions import Contributions, evaluating
from esper.kasmina.governor import Alarm, Governor
from esper.kasmina.health import tensor_norms
from esper.kasmina.network import MorphogeneticModel
from esper.kasmina.optimizer_groups import clone_tree
from esper.leyline import SlotTable, Stage, StageMove

SNAPSHOT_EVERY: Final = 3
"""Number of good epochs between snapshots; a snapshot is also taken after a fossilisation."""
ROLLBACK_LIMIT: Final = 3
"""Default number of rollbacks at which an episode ends."""
NOT_FINITE: Final = Alarm("non-finite", math.nan, math.inf)


class Recoverable(Protocol):
    """Network in training that can return to a snapshot."""

    @property
    def model(self) -> MorphogeneticModel: ...

    def weights(self) -> Any:
        """Return weights, seeds, slot table and optimiser states."""

    def load_weights(self, weights: Any) -> None:
        """Return to a snapshot."""

    def follow_rollback(self, number: int, stayed: Sequence[int]) -> None:
        """Update the training after rollback ``number``, which has not changed the seeds of the slots
        ``stayed``.
        """

    def count(self, moves: Sequence[StageMove]) -> None:
        """Update the training after stage moves."""

    def measure(self, *, contributions: bool) -> Contributions:
        """Score the network and, on request, each seed's contribution."""


class Intervention(NamedTuple):
    """Intervention: an alarm, the recovery action, and the stage moves that the action caused."""

    alarm: Alarm
    answer: str
    moves: list[StageMove]


class Recovery:
    """Check of every epoch of a training, and rollback of epochs that broke it.

    Args:
        trained: Network in training.
        governor: Decides whether a loss is acceptable.
        loss: Loss of a minibatch; only needed to find the cause of a non-finite minibatch.
        limit: Number of rollbacks at which recovery gives up.
    """

    def __init__(
        self,
        trained: Recoverable,
        governor: Governor,
        loss: Callable[[Tensor, Tensor], Tensor] | None = None,
        limit: int = ROLLBACK_LIMIT,
    ) -> None:
        self._trained = trained
        self._loss = loss
        self._limit = limit
        self._governor = governor
        self._interventions: list[Intervention] = []
        self.rollbacks = 0
        self.rolled_back = False
        """Whether the epoch that was checked last ended in a rollback."""
        self._fossilized = False
        self._good: Any = None
        """Last snapshot of the training; None after another state was loaded."""
        self._keep(0)

    @property
    def given_up(self) -> bool:
        """Whether the training has reached the limit of rollbacks."""
        return self.rollbacks >= self._limit

    def note_fossil(self) -> None:
        """Take a snapshot after the next good epoch, so that a new fossil survives a rollback."""
        self._fossilized = True

    def interventions(self) -> list[Intervention]:
        """Return the interventions since the last call."""
        made, self._interventions = self._interventions, []
        return made

    def check_epoch(self, measured: Contributions, epoch: int, *, broken: bool) -> bool:
        """Check the losses of an epoch, and remove a seed or roll back if they raise an alarm.

        Args:
            measured: Validation of the network after the epoch.
            epoch: Number of the epoch.
            broken: Whether the epoch had non-finite numbers that no seed caused.

        Returns:
            Whether the network changed, so that it must be measured again.
        """
        self.rolled_back = False
        alarm = NOT_FINITE if broken else self._governor.check(measured.loss)
        if alarm is None:
            due = self._fossilized or epoch - self._good_epoch >= SNAPSHOT_EVERY
            if due and not self._governor.suspicious:
                self._keep(epoch)
            return False
        guilty = None if broken else self._guilty(measured)
        if guilty is None and self._good is None:
            return False
        if guilty is None:
            self._roll_back(alarm)
        else:
            self._prune(guilty, str(alarm), alarm)
        self._governor.forgive()
        return True

    # --- snapshots ----------------------------------------------------------------------------

    def forget_snapshot(self) -> None:
        """Drop the snapshot, after another state was loaded; the next snapshot is taken after the next good
        epoch.
        """
        self._good, self._good_epoch = None, -SNAPSHOT_EVERY

    def _keep(self, epoch: int) -> None:
        self._good_epoch, self._good = epoch, self._trained.weights()
        self._fossilized = False

    def _roll_back(self, alarm: Alarm) -> None:
        trained, table = self._trained, self._trained.model.table
        self.rollbacks += 1
        self.rolled_back = True
        before = table.copy()
        trained.load_weights(self._good)
        same = (before.seed_id == table.seed_id) & table.occupied
        trained.follow_rollback(self.rollbacks, same[0].nonzero()[0].tolist())
        answer = f"rolled back to epoch {self._good_epoch}"
        self._interventions.append(Intervention(alarm, answer, _undone(before, table)))

    def state(self) -> dict[str, Any]:
        """Return counters, governor and the last snapshot."""
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

    # --- removal of the seed that caused an alarm ---------------------------------------------

    def _guilty(self, measured: Contributions) -> int | None:
        """Return the slot of the live seed without which the loss is lowest, if that loss raises no alarm."""
        if not measured.slots and self._trained.model.blended:
            measured = self._trained.measure(contributions=True)
        live = [slot for slot in measured.slots if self._trained.model.table.live[0, slot]]
        without = {slot: measured.loss_without(slot) for slot in live}
        healthy = {s: loss for s, loss in without.items() if self._governor.trouble_with(loss) is None}
        return min(healthy, key=lambda slot: healthy[slot]) if healthy else None

    def remove_broken(self, slots: list[int]) -> None:
        """Remove incubating seeds that are no longer finite; the host is not affected."""
        for slot in slots:
            self._prune(slot, "non-finite while incubating")

    def remove_guilty(self, x: Tensor, y: Tensor) -> bool:
        """Remove the live seeds that made a minibatch non-finite; return whether there was such a seed."""
        guilty = [slot for slot in self._trained.model.blended if self._explains(slot, x, y)]
        for slot in guilty:
            self._prune(slot, "non-finite while blended")
        return bool(guilty)

    def _explains(self, slot: int, x: Tensor, y: Tensor) -> bool:
        """Return whether ``slot`` has a live seed that is non-finite, or without which loss and gradients are
        finite.
        """
        model = self._trained.model
        if not model.table.live[0, slot]:
            return False
        if not model.is_finite(slot):
            return True
        assert self._loss is not None
        with evaluating(model), model.taking_part(model.without(slot)):
            without = self._loss(x, y)
            trained = [p for p in model.parameters() if p.requires_grad]
            gradients = torch.autograd.grad(without, trained, materialize_grads=True)
        return math.isfinite(without.item()) and bool(tensor_norms(list(gradients)).isfinite().all())

    def _prune(self, slot: int, reason: str, alarm: Alarm = NOT_FINITE) -> None:
        model = self._trained.model
        moves = lifecycle.prune(model.table, 0, slot, model.rules, cause="governor", reason=reason)
        actuator.settle(model, moves)
        self._trained.count(moves)
        answer = f"pruned {model.slot_config.slot_ids[slot]}"
        self._interventions.append(Intervention(alarm, answer, moves))


def _undone(before: SlotTable, after: SlotTable) -> list[StageMove]:
    """Return the stage moves between the slot tables before and after a rollback."""
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


class UserTraining:
    """User's training that can return to a snapshot of network, seeds, slot table and optimiser state.

    Args:
        model: Network that the user trains.
        record_moves: Called with the stage moves of a seed that recovery removes.
        measure_again: Measures the contributions of all active seeds.
        copies: Copies of the network that follow its seeds, such as averages.
    """

    def __init__(
        self,
        model: MorphogeneticModel,
        record_moves: Callable[[Sequence[StageMove]], None],
        measure_again: Callable[[], Contributions],
        copies: Sequence[nn.Module] = (),
    ) -> None:
        self.model = model
        self._copies = copies
        self.count = record_moves
        self._measure_again = measure_again

    def weights(self) -> dict[str, Any]:
        """Return weights of the network and its copies, the layout of seeds, and optimiser states by name."""
        net = self.model.host
        names: dict[Tensor, str] = {p: name for name, p in net.named_parameters()}
        return {
            "net": _cloned(net),
            "layout": self.model.layout(),
            "copies": [_cloned(copy) for copy in self._copies],
            "moments": {
                key: {names[p]: clone_tree(kept) for p, kept in optimiser.state.items() if p in names}
                for key, optimiser in self._optimisers().items()
            },
        }

    def load_weights(self, weights: dict[str, Any]) -> None:
        """Return to a snapshot."""
        net = self.model.host
        self.model.load_layout(weights["layout"])
        net.load_state_dict(weights["net"])
        # A copy that was added after the snapshot starts from the network's weights.
        for copy, kept in zip_longest(self._copies, weights["copies"], fillvalue=weights["net"]):
            copy.load_state_dict(kept)
        for key, optimiser in self._optimisers().items():
            moments = weights["moments"].get(key, {})
            for name, parameter in net.named_parameters():
                optimiser.state.pop(parameter, None)
                if name in moments:
                    optimiser.state[parameter] = clone_tree(moments[name])

    def _optimisers(self) -> dict[str, Optimizer]:
        """Return the optimisers by number and class, because moments cannot be loaded into an optimiser of
        another class.
        """
        optimisers = self.model.groups.optimisers if self.model.groups else ()
        return {f"{number} {type(each).__name__}": each for number, each in enumerate(optimisers)}

    def follow_rollback(self, number: int, stayed: Sequence[int]) -> None:
        """Do nothing: a rollback does not undo compute, and the user's random generators have advanced."""

    def measure(self, *, contributions: bool) -> Contributions:
        """Measure the contributions of all active seeds."""
        return self._measure_again()


def _cloned(net: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in net.state_dict().items()}
