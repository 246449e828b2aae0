"""Growth of a user's network inside the user's training loop, with the user's optimiser.

::

    growth = esper.Growth(net, optimizer, sample=batch, mode="min")
    for epoch in range(30):
        train_as_always(net, optimizer)
        for event in growth.end_epoch(evaluate):
            print(event)
    net = growth.finish()
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from esper.growth.adapters import AdapterGrowth
from esper.growth.argument_checks import check_blueprints, check_calibration, check_settings
from esper.growth.batch_training import recalibrate
from esper.growth.growth_events import GrowthEvent
from esper.growth.torch_wrappers import unwrapped
from esper.kasmina.actuator import Outcome, advance, apply_action, tick
from esper.kasmina.compute import forward_flops
from esper.kasmina.contributions import Contributions, Evaluate, MetricScorer, measure, record_contributions
from esper.kasmina.dry_run import batch_norms
from esper.kasmina.governor import Governor
from esper.kasmina.recovery import Recovery, UserTraining
from esper.kasmina.transaction import Transaction, all_or_nothing
from esper.leyline.errors import BlueprintError, EsperError, HostError
from esper.leyline.factored_actions import OP_NAMES, OP_WAIT, BoolArray, Head, canonicalise, check_actions
from esper.leyline.rows import StageMove
from esper.leyline.rules import LifecycleRules
from esper.leyline.signals import EnvFacts, RaceResult
from esper.leyline.slot_table import legal_slots_by_op
from esper.leyline.stages import Stage
from esper.tamiyo.controller_registry import ControllerLog, controller_from

RULES: Final = LifecycleRules(min_training_epochs=0, enters_at_once=True, min_prune_age=1, embargo_epochs=1)
UNLIMITED: Final = 1_000_000
"""Number of epochs that stands for infinity: the length of a training of unknown length, or the age of a
measurement that was never made."""
MEASURED_SEEDS: Final = 4
"""Largest number of seeds measured per epoch, each by one call of ``evaluate``; permanent seeds are measured
only on request."""


class Growth(AdapterGrowth):
    """Slots in a user's network, the seeds in the slots, and the controller that plants and prunes seeds.

    Until a seed is planted, the outputs of the network are bit-equal to those without slots.

    Args:
        net: Network that is trained, also inside ``torch.compile`` or ``DistributedDataParallel``.
        optimizer: Optimiser of the network, or a list of optimisers; without one, call ``bind`` later.
        sample: Input that the network is called with: a tensor, a tuple of arguments, or a dict of
            keyword arguments.
        mode: Direction of the metric: ``"min"`` for a loss, ``"max"`` if larger values are better.
        slots: Names or globs of the submodules after which seeds may be planted, or ``"auto"``.
        controller: ``"auto"``, the name of a controller, a plan such as ``"conv_light@layer2:4"``, the folder
            of a trained policy, an object with ``reset`` and ``decide``, or None to decide by hand.
        epochs: Length of the training in epochs, if known.
        calibrate: Training batches from which BatchNorm statistics are recomputed while a seed is switched
            off.
        max_seeds: Largest number of seeds at one time; 0 means no limit.
        max_params: Largest number of parameters of all seeds together.
        follow: Copies of the network that also receive every seed, such as an ``AveragedModel``.
        rollback: Whether to remove the seed that caused a divergence of the metric, or else return to the
            last good epoch.
        shapley: Whether to also measure Shapley values and interactions of the seeds; up to 2^n evaluations
            per epoch.
        incubation_epochs: Epochs in which a new seed learns without changing the output; incubation needs a
            call of ``incubate`` for every batch.
        blueprints: Names of the blueprints that may be planted; all unless given.

    Raises:
        HostError: No slot can be attached, the optimiser does not train the network, or a module in
            ``follow`` is not a copy of the network. After this error the network is unchanged.
        EsperError: An argument is not valid.

    Example:
        >>> growth = esper.Growth(net, optimizer, sample=x[:2], mode="min")
    """

    def __init__(  # noqa: PLR0913  all arguments but two are keyword-only
        self,
        net: nn.Module,
        optimizer: Any = None,
        *,
        sample: Any,
        mode: str | None = None,
        slots: str | Sequence[str] = "auto",
        controller: Any = "auto",
        epochs: int | None = None,
        calibrate: Iterable[Any] | None = None,
        max_seeds: int = 0,
        max_params: int | None = None,
        follow: Sequence[Any] = (),
        rollback: bool = False,
        shapley: bool = False,
        incubation_epochs: int = 0,
        blueprints: Sequence[str] | None = None,
    ) -> None:
        limits = {"epochs": epochs, "max_seeds": max_seeds, "max_params": max_params}
        check_settings(mode, **limits, incubation_epochs=incubation_epochs)
        check_calibration(calibrate)
        named = check_blueprints(blueprints)
        rules = replace(RULES, max_seeds=max_seeds, min_training_epochs=incubation_epochs, blueprints=named)
        before = Transaction([unwrapped(net), *(each for each in follow if isinstance(each, nn.Module))])
        try:
            super().__init__(net, optimizer, sample, slots, rules, max_params, follow)
            wanted = "saturation" if isinstance(controller, str) and controller == "auto" else controller
            self.controller = controller_from(wanted, self._space, epochs)
            """Controller of the seeds; None if seeds are planted and pruned by hand."""
            self._log = None if self.controller is None else ControllerLog(self.controller)
            self.mode, self._shapley = str(mode), shapley
            self._epochs, self._calibrate = epochs, calibrate
            self._last = (OP_WAIT, True)
            self._governor = Governor()
            trained = UserTraining(
                self.network,
                lambda moves: self.recorder.moves(moves, None),
                self._measure_again,
                self._copies.modules,
                lambda tensors: self._change.keep(tensors),  # noqa: PLW0108  in each call another one
            )
            self.recovery = Recovery(trained, self._governor) if rollback else None
            """Rollback with the snapshot of the last good epoch; None if ``rollback`` is off."""
        except BaseException:  # KeyboardInterrupt (Ctrl-C) must remove the slots, too.
            before.undo()
            raise

    def _transaction(self) -> Transaction:
        change = super()._transaction()
        change.include(objects=[each for each in (self._governor, self.recovery) if each is not None])
        if self._log is not None:
            change.keep_containers([self._log.entries])
            change.afterwards(self._log.rebuild)
        return change

    # --- end of an epoch ------------------------------------------------------------------------------

    @all_or_nothing
    def end_epoch(self, evaluate: Evaluate, *, every_seed: bool = False) -> list[GrowthEvent]:
        """Measure the network and its seeds, let the controller decide, and apply its decisions.

        Args:
            evaluate: Function without arguments that returns the metric of ``net``: one number, or one number
                per batch, from which contributions get standard errors. ``evaluate`` is called once for the
                whole network, and once more for each measured seed.
            every_seed: Whether to measure permanent seeds in addition to the others.

        Returns:
            Events of this epoch: seeds that were measured, planted, pruned or made permanent, and warnings.

        Raises:
            EsperError: There is no optimiser, ``evaluate`` returns no number, or the growth has finished.

        Example:
            >>> for event in growth.end_epoch(lambda: accuracy(net)):
            ...     print(event)
        """
        events = self.measure_epoch(evaluate, every_seed=every_seed)
        return events + self.decide()

    @all_or_nothing
    def measure_epoch(
        self, evaluate: Evaluate, *, every_seed: bool = False, broken: bool = False
    ) -> list[GrowthEvent]:
        """Do the first half of ``end_epoch``: measure and check network and seeds, advance stages of seeds.

        Args:
            evaluate: Function that returns the metric of ``net``, as in ``end_epoch``.
            every_seed: Whether to measure permanent seeds in addition to the others.
            broken: Whether the epoch's training had non-finite numbers; ``rollback`` undoes such an epoch.

        Returns:
            Events of measured seeds, automatic stage moves and warnings.
        """
        self._check_unfinished("end_epoch")
        groups = self.network.groups
        if groups is None or not groups.optimisers:
            raise EsperError("Growth has no optimiser, so no seed would learn; call bind(optimizer) first")
        self.network.follow_state()
        self._evaluate = evaluate
        with self.ledger.timed("measure"):
            scorer = self._scorer()
            self._narrator.epoch += 1
            tick(self.network)
            events = [] if broken else self._checks.check_training()
            events += self._measure(scorer, every_seed=every_seed)
            events += self._recovered(broken)
        events += self._done(advance(self.network))
        events += self._checks.check_score(self.measured.score)
        self.facts = self._make_facts()
        """Measurements of the last epoch, in the form that a controller takes."""
        return events

    @all_or_nothing
    def decide(self, race: RaceResult | None = None) -> list[GrowthEvent]:
        """Do the second half of ``end_epoch``: let the controller decide, and apply its decisions.

        Args:
            race: Result of a race, if one was run after this epoch.

        Returns:
            Events of the controller's actions; none without a controller.
        """
        if self._log is None or not math.isfinite(self.facts.val_score):
            return []
        self.facts = replace(self.facts, race=race)
        table = self.network.table
        actions = self._log.decide(self.facts, table)
        check_actions(actions, 1, table.num_slots)
        slot = int(actions[0, Head.SLOT])
        alpha = table.alpha[0, [slot]]
        action = self._processes.agreed(canonicalise(actions, alpha)[0])
        legal = legal_slots_by_op(table, self.network.rules)[0]
        try:
            outcome = apply_action(self.network, action, self._next_seed, legal)
        except (BlueprintError, HostError) as error:
            outcome = Outcome(False, (), str(error))
        self.recorder.decided(action, alpha, legal, outcome)
        self.recorder.emit_last_action()
        self._last = (int(action[Head.OP]), outcome.succeeded)
        if action[Head.OP] == OP_WAIT:
            return []
        if not outcome.succeeded:
            reason = ", ".join((str(outcome.refused_by), *outcome.failed_checks))
            wish = f"{OP_NAMES[action[Head.OP]]} in {self.network.sites[slot].name}"
            sentence = f"{self._log.name} wanted {wish}: {reason}"
            return [GrowthEvent(self._narrator.epoch, "refused", sentence, self.slots[slot])]
        return self._done(outcome.moves)

    @all_or_nothing
    def end_trials(self, evaluate: Evaluate) -> list[GrowthEvent]:
        """Remove the seeds on trial that the controller would not make permanent, according to its method
        ``unworthy``, which a plan has; ``finish`` would keep them.

        The seed with the smallest contribution is removed first, and the others are measured again.

        Args:
            evaluate: Function that returns the metric of ``net``, as in ``end_epoch``.

        Returns:
            Events of removed and measured seeds; none without a plan.
        """
        self._evaluate, table = evaluate, self.network.table
        events: list[GrowthEvent] = []
        unworthy_seeds = getattr(self.controller, "unworthy", None)  # A method that controllers may have.
        while unworthy_seeds is not None and (unworthy := unworthy_seeds(table)[0]).any():
            worst = np.where(unworthy, np.nan_to_num(table.contribution[0]), math.inf).argmin()
            events.append(self.prune(self.slots[int(worst)]))
            if self._calibrate is not None:
                recalibrate(self.net, self._calibrate)
            events += self._measured(self._scorer(), table.in_forward[0] & table.live[0], None, False)
        return events

    @all_or_nothing
    def measure(self, evaluate: Evaluate, *, shapley: bool = False) -> list[GrowthEvent]:
        """Measure the seeds, permanent seeds included, that were not measured in this epoch.

        Args:
            evaluate: Function that returns the metric of ``net``, as in ``end_epoch``; called once for each
                seed, or with ``shapley`` once for each configuration.
            shapley: Whether to measure all blended seeds again, with Shapley values and interactions.

        Returns:
            One event of kind ``measured`` per measured seed.
        """
        self._check_unfinished("measure")
        self.network.follow_state()
        table = self.network.table
        waiting = table.in_forward[0] & ((table.epochs_since_measured[0] != 0) | shapley)
        self._evaluate = evaluate
        return self._measured(self._scorer(), waiting, None, shapley) if waiting.any() else []

    def _scorer(self) -> MetricScorer:
        return MetricScorer(self.network, self._evaluate, mode=self.mode, calibrate=self._calibrate)

    def _measure(self, scorer: MetricScorer, *, every_seed: bool) -> list[GrowthEvent]:
        table = self.network.table
        of = table.in_forward[0]
        if not every_seed:
            of = of & (table.stage[0] != Stage.FOSSILIZED)
        return self._measured(scorer, of, None if every_seed else MEASURED_SEEDS, self._shapley)

    def _measured(
        self, scorer: MetricScorer, of: BoolArray, most: int | None, shapley: bool
    ) -> list[GrowthEvent]:
        """Measure the seeds in the slots ``of``, but at most ``most`` seeds: those measured longest ago."""
        table = self.network.table
        waiting = np.where(table.epochs_since_measured[0] < 0, UNLIMITED, table.epochs_since_measured[0])
        chosen = sorted(np.flatnonzero(of).tolist(), key=lambda i: -int(waiting[i]))[:most]
        # The Shapley values of more than four seeds are estimated from sampled orders of the seeds; the
        # sampling leaves the user's random state unchanged.
        orders = torch.Generator().manual_seed(self._narrator.epoch)
        found = measure(chosen, scorer, generator=orders, only_contributions=not shapley)
        self.measured: Contributions = self._processes.agreed(found)
        """Scores and contributions of the latest measurement."""
        record_contributions(table, self.measured)
        calibrated = self._calibrate is not None or not batch_norms(self.net)
        values = zip(self.measured.contribution, self.measured.error, self.measured.shapley, strict=True)
        return [
            self._narrator.worth(slot, *map(float, known), calibrated=calibrated)
            for slot, known in zip(self.measured.slots, values, strict=True)
        ]

    def _recovered(self, broken: bool) -> list[GrowthEvent]:
        """If ``rollback`` is on, undo an epoch after which the metric diverges, and measure the restored
        network."""
        recovery = self.recovery
        if recovery is None or recovery.given_up:
            return []
        if not recovery.check_epoch(self.measured, self._narrator.epoch, broken=broken):
            return []
        made = recovery.interventions()
        self.recorder.interventions(made, None)
        events = [
            GrowthEvent(self._narrator.epoch, "rolled_back", f"{each.alarm}: {each.answer}") for each in made
        ]
        self._copies.sync()
        return events + self._measure(self._scorer(), every_seed=False)

    def _measure_again(self) -> Contributions:
        self._measure(self._scorer(), every_seed=True)
        return self.measured

    def _done(self, moves: Iterable[StageMove]) -> list[GrowthEvent]:
        made = list(moves)
        if any(move.target is Stage.FOSSILIZED for move in made) and self.recovery is not None:
            self.recovery.note_fossil()
        return super()._done(made)

    def _make_facts(self) -> EnvFacts:
        grown = self.network.grown_params()
        host = sum(p.numel() for p in self.net.parameters()) - grown
        op, success = self._last
        score = self.measured.score
        return EnvFacts(
            epoch=self._narrator.epoch,
            max_epochs=self._epochs or UNLIMITED,
            train_loss=math.nan,
            train_score=math.nan,
            val_loss=-score,
            val_score=score,
            params=host + grown,
            grown_params=grown,
            param_budget=host + (self.network.max_params or host),
            host_gradient_norm=math.nan,
            minibatches=0,
            last_op=op,
            last_success=success,
            ended=self._narrator.epoch == self._epochs,
            rolled_back=self.recovery is not None and self.recovery.rolled_back,
            cost=self.flops,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return slots, seeds and counters as plain values without weights; save them with the state dicts of
        network and optimiser.
        """
        return {
            **self.network.layout(),
            "epoch": self._narrator.epoch,
            "next_seed": self._next_seed,
            "last": list(self._last),
            "log": [] if self._log is None else list(self._log.entries),
            "watch": self._checks.state(),
            "governor": self._governor.state(),
        }

    @all_or_nothing
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Build the seeds of a saved state; load the state dicts of network and optimiser after this call.

        Args:
            state: Result of ``state_dict``, of a growth with the same network class and slots.

        Raises:
            HostError: The state belongs to a network with other slots.
        """
        self._check_unfinished("load_state_dict")
        self.network.load_layout(state)
        self._narrator.epoch, self._next_seed = state["epoch"], state["next_seed"]
        self._last = (int(state["last"][0]), bool(state["last"][1]))
        self._checks.load_state(state["watch"])
        self._governor.load_state(state["governor"])
        if self.recovery is not None:
            self.recovery.forget_snapshot()
        if self._log is not None:
            self._log.load(state["log"])
        self.flops = forward_flops(self.net, self.sample)
