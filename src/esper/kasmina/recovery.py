"""Recovery from a breakdown: remove the seed that caused the breakdown, or return to the last good state.

A rollback restores weights, optimiser states and seeds. A rollback does not change the epoch count or the
order of the data. After a rollback random streams restart with new numbers, so that the same failure is not
repeated.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.kasmina import actuator, lifecycle
from esper.kasmina.contributions import Contributions, evaluating
from esper.kasmina.edit_notes import weights_of
from esper.kasmina.governor import Alarm, Governor
from esper.kasmina.incubation import tensor_norms
from esper.kasmina.network import MorphogeneticModel
from esper.kasmina.optimizer_state import clone_tree
from esper.leyline import SlotTable, Stage, StageMove

SNAPSHOT_EVERY: Final = 3
"""Number of epochs between snapshots; a snapshot is also taken after a seed became permanent."""
ROLLBACK_LIMIT: Final = 3
"""Default number of rollbacks after which an episode ends."""
NOT_FINITE: Final = Alarm("non-finite", math.nan, math.inf)


class Recoverable(Protocol):
    """Interface of a training that can return to a snapshot of its network."""

    @property
    def model(self) -> MorphogeneticModel: ...

    def weights(self) -> Any:
        """Return a snapshot: weights, seeds, slot table and optimiser states."""

    def load_weights(self, weights: Any) -> None:
        """Restore a snapshot that ``weights`` returned."""

    def follow_rollback(self, number: int, stayed: Sequence[int]) -> None:
        """Update random streams and FLOP counts after rollback ``number``; ``stayed`` are the slots whose
        seed the rollback did not change.
        """

    def count(self, moves: Sequence[StageMove]) -> None:
        """Update counters of the training after stage changes."""

    def measure(self, *, contributions: bool) -> Contributions:
        """Score the network and, with ``contributions``, measure the contribution of each seed."""


class Intervention(NamedTuple):
    """Intervention of the governor: an alarm, a description of the recovery action, and the stage changes
    that the action caused."""

    alarm: Alarm
    answer: str
    moves: list[StageMove]


class Recovery:
    """Checks every epoch of a training for a breakdown; removes the seed that caused it, or rolls the network
    back.

    Args:
        trained: Training whose network is checked.
        governor: Governor that decides whether a validation loss is acceptable.
        loss: Function that returns the loss of a minibatch; only needed to find the seed that made a
            minibatch non-finite.
        limit: Number of rollbacks after which recovery gives up.
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
        """Whether the last checked epoch was rolled back."""
        self._fossilized = False
        self._good: Any = None
        """Last snapshot of a good epoch; None after the state of another training was loaded."""
        self._keep(0)

    @property
    def given_up(self) -> bool:
        """Whether the number of rollbacks has reached its limit."""
        return self.rollbacks >= self._limit

    def note_fossil(self) -> None:
        """Request a snapshot after the next good epoch, so that a later rollback does not remove a new
        fossil."""
        self._fossilized = True

    def interventions(self) -> list[Intervention]:
        """Return the interventions of the governor since the last call."""
        made, self._interventions = self._interventions, []
        return made

    def check_epoch(self, measured: Contributions, epoch: int, *, broken: bool) -> bool:
        """Check the validation loss of an epoch; if it raises an alarm, remove a seed or roll back.

        Args:
            measured: Scores of the network and its seeds after the epoch.
            epoch: Number of epochs trained so far.
            broken: Whether losses or gradients of the epoch were non-finite and no seed caused this.

        Returns:
            Whether the network changed, so that its score must be measured again.
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
        """Discard the last snapshot, because another state was loaded; a new snapshot is taken after the next
        good epoch."""
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
        """Return the number of rollbacks, the state of the governor, and the last snapshot."""
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
        """Return the slot of the live seed whose removal gives the lowest loss; None if even that loss raises
        an alarm."""
        if not measured.slots and self._trained.model.blended:
            measured = self._trained.measure(contributions=True)
        live = [slot for slot in measured.slots if self._trained.model.table.live[0, slot]]
        without = {slot: measured.loss_without(slot) for slot in live}
        healthy = {s: loss for s, loss in without.items() if self._governor.trouble_with(loss) is None}
        return min(healthy, key=lambda slot: healthy[slot]) if healthy else None

    def remove_broken(self, slots: list[int]) -> None:
        """Remove incubating seeds with non-finite weights; the output of the host is not affected."""
        for slot in slots:
            self._prune(slot, "non-finite while incubating")

    def remove_guilty(self, x: Tensor, y: Tensor) -> bool:
        """Remove the live seeds that made the loss of a minibatch non-finite; return whether there was such a
        seed."""
        guilty = [slot for slot in self._trained.model.blended if self._explains(slot, x, y)]
        for slot in guilty:
            self._prune(slot, "non-finite while blended")
        return bool(guilty)

    def _explains(self, slot: int, x: Tensor, y: Tensor) -> bool:
        """Return whether the seed at ``slot`` is live and causes a non-finite loss: its weights are
        non-finite, or loss and gradients are finite without it.
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
    """Return the stage changes of a rollback, computed from the slot tables before and after the rollback."""
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
        record_moves: Function that is called with the stage changes of a seed that recovery removes.
        measure_again: Function that measures the contributions of all blended seeds.
        copies: Copies of the network, such as weight averages, that receive the same seeds.
        keep: Function that is called with all weights before a snapshot overwrites them.
    """

    def __init__(
        self,
        model: MorphogeneticModel,
        record_moves: Callable[[Sequence[StageMove]], None],
        measure_again: Callable[[], Contributions],
        copies: Sequence[nn.Module] = (),
        keep: Callable[[Iterable[Tensor]], None] = lambda _: None,
    ) -> None:
        self.model = model
        self._keep = keep
        self._copies = copies
        self.count = record_moves
        self._measure_again = measure_again

    def weights(self) -> dict[str, Any]:
        """Return a snapshot: weights of the network and its copies, the layout of seeds, and optimiser states
        by parameter name."""
        net = self.model.host
        names: dict[Tensor, str] = {p: name for name, p in net.named_parameters()}
        return {
            "net": weights_of(net),
            "layout": self.model.layout(),
            "copies": [weights_of(copy) for copy in self._copies],
            "moments": {
                key: {names[p]: clone_tree(kept) for p, kept in optimiser.state.items() if p in names}
                for key, optimiser in self._optimisers().items()
            },
        }

    def load_weights(self, weights: dict[str, Any]) -> None:
        """Restore a snapshot that ``weights`` returned."""
        net = self.model.host
        self._keep(parameter for each in (net, *self._copies) for parameter in each.parameters())
        self.model.load_layout(weights["layout"])
        net.load_state_dict(weights["net"])
        # A copy that was added after the snapshot has no saved weights and gets those of the network.
        for copy, kept in zip_longest(self._copies, weights["copies"], fillvalue=weights["net"]):
            copy.load_state_dict(kept)
        for key, optimiser in self._optimisers().items():
            moments = weights["moments"].get(key, {})
            for name, parameter in net.named_parameters():
                optimiser.state.pop(parameter, None)
                if name in moments:
                    optimiser.state[parameter] = clone_tree(moments[name])

    def _optimisers(self) -> dict[str, Optimizer]:
        """Return the optimisers; the keys are number and class name, so that the saved state of an optimiser
        is not loaded into an optimiser of another class.
        """
        optimisers = self.model.groups.optimisers if self.model.groups else ()
        return {f"{number} {type(each).__name__}": each for number, each in enumerate(optimisers)}

    def follow_rollback(self, number: int, stayed: Sequence[int]) -> None:
        """Do nothing: a rollback neither subtracts FLOPs nor resets the user's random generators."""

    def measure(self, *, contributions: bool) -> Contributions:
        """Measure the network and the contributions of all blended seeds."""
        return self._measure_again()
