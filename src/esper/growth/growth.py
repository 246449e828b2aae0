"""Growth of a user's own network, trained by the user's own loop and optimiser.

::

    growth = esper.Growth(net, optimizer, sample=batch)
    for epoch in range(30):
        train_as_always(net, optimizer)
        for event in growth.end_epoch(evaluate):
            print(event)
    net = growth.finish()
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

import numpy as np
from torch import nn

from esper.growth import finishing, sites, surroundings
from esper.growth.body import GrowingBody
from esper.growth.deciding import controller_of
from esper.growth.events import GrowthEvent, Narrator
from esper.growth.limits import check_alpha, check_calibration, check_settings
from esper.growth.measuring import Evaluate, Evaluation
from esper.growth.membership import Membership
from esper.growth.recording import Recorder
from esper.growth.watching import Watch
from esper.kasmina import gates, lifecycle
from esper.kasmina.blueprints import blueprint_named
from esper.leyline import (
    BLEND_IDS,
    OP_NAMES,
    OP_WAIT,
    AlphaCurve,
    Controller,
    EnvFacts,
    EpochFacts,
    Head,
    LifecycleRules,
    SlotTable,
    Stage,
    StageMove,
    canonicalise,
    check_actions,
)
from esper.leyline.errors import (
    BlueprintError,
    EsperError,
    GrowthWarning,
    HostError,
    SlotError,
    UnknownNameError,
)
from esper.leyline.factored_actions import BoolArray
from esper.tolaria.actuator import Outcome, advance, apply_action, settle, tick
from esper.tolaria.calibration import batch_norms

RULES: Final = LifecycleRules(min_training_epochs=0, enters_at_once=True, min_prune_age=1, embargo_epochs=1)
"""A seed is in the forward from its birth: without a loss function there is nothing to incubate on."""
UNLIMITED: Final = 1_000_000
"""Epochs of a loop that does not say how many it has."""
MEASURED_SEEDS: Final = 4
"""Seeds switched off per epoch, one call of evaluate each; permanent ones are measured when asked for."""


class Growth:
    """Slots in ``net``, the seeds in them, and who decides about them."""

    def __init__(  # noqa: PLR0913  all but two by name
        self,
        net: nn.Module,
        optimizer: Any = None,
        *,
        sample: Any,
        slots: str | Sequence[str] = "auto",
        controller: Any = "auto",
        higher_is_better: bool = True,
        epochs: int | None = None,
        calibrate: Iterable[Any] | None = None,
        max_seeds: int = 0,
        max_params: int | None = None,
        rules: LifecycleRules = RULES,
    ) -> None:
        """Attach empty slots; the network computes what it did before, bit for bit.

        ``net`` is the network that is trained, also under ``torch.compile`` or ``DistributedDataParallel``;
        ``optimizer`` the one that trains it, or several; without it ``bind`` follows. ``sample`` is what
        it is called with: a tensor, a tuple of arguments or a dict of named ones. ``slots`` are names of
        submodules, globs, or ``auto``.
        ``controller`` is ``auto``, a plan (``conv_light@layer2:4``), the folder of a policy, a controller, or
        None. ``calibrate`` are training batches for BatchNorm statistics of networks with a seed off.
        """
        check_settings(higher_is_better, epochs=epochs, max_seeds=max_seeds, max_params=max_params)
        check_calibration(calibrate)
        self.net, self.sample = surroundings.unwrapped(net), sample
        membership = Membership(optimizer, self.net)
        rules = replace(rules, max_seeds=max_seeds or rules.max_seeds)
        self._body = GrowingBody(self.net, membership, slots, sample, rules, max_params)
        self._narrator = Narrator(self._body)
        self._watch = Watch(self._body, self._narrator)
        self._higher_is_better = higher_is_better
        self._epochs, self._calibrate = epochs, calibrate
        self._next_seed, self._last = 0, (OP_WAIT, True)
        self._log: list[dict[str, Any]] = []
        self._finished = False
        self._cost = sites.forward_flops(self.net, self.sample)
        with finishing.plain_on_error(self.finish):
            self._controller = controller_of(controller, self._body.action_space, lambda: self._cost, epochs)
        self.recorder = Recorder(self._body, self._narrator, self._controller)

    def bind(self, optimizer: Any) -> None:
        """The optimiser that trains the network from now on, or several."""
        self._check_unfinished("bind")
        self._body.follow_network()
        self._body.bind(Membership(optimizer, self.net))

    # --- the end of an epoch --------------------------------------------------------------------------

    def end_epoch(self, evaluate: Evaluate, *, every_seed: bool = False) -> list[GrowthEvent]:
        """Measure, decide, act; returns what happened.

        ``evaluate`` takes nothing and returns the metric of ``net``: a number, or one per batch (then
        contributions have error bars). It is called once, and once more for each seed that is measured:
        those that are undecided, or with ``every_seed`` the permanent ones too.
        """
        self._check_unfinished("end_epoch")
        if not self._body.membership.optimisers:
            raise EsperError("Growth has no optimiser, so no seed would learn; call bind(optimizer) first")
        self._body.follow_network()
        evaluation = self._evaluation(evaluate)
        score = self._agreed(evaluation.score.mean)
        self._narrator.epoch += 1
        tick(self._body)
        events = self._watch.check_seeds() + self._watch.check_compiled()
        measured = self._body.table.in_forward[0]
        if not every_seed:
            measured = measured & (self._body.table.stage[0] != Stage.FOSSILIZED)
        events += self._measure(evaluation, measured, None if every_seed else MEASURED_SEEDS)
        events += self._done(advance(self._body))
        events += self._watch.check_score(evaluation.score)
        facts = self._facts(score)
        self.recorder.ended(facts)
        if self._controller is not None and math.isfinite(score):
            events += self._decide(facts)
        return events

    def measure(self, evaluate: Evaluate) -> list[GrowthEvent]:
        """What seeds are worth that this epoch has not measured, permanent ones too: one evaluation each."""
        self._check_unfinished("measure")
        self._body.follow_network()
        table = self._body.table
        waiting = table.in_forward[0] & (table.epochs_since_measured[0] != 0)
        return self._measure(self._evaluation(evaluate), waiting) if waiting.any() else []

    def _evaluation(self, evaluate: Evaluate) -> Evaluation:
        return Evaluation(
            self.net, evaluate, higher_is_better=self._higher_is_better, calibrate=self._calibrate
        )

    def _measure(self, evaluation: Evaluation, of: BoolArray, most: int | None = None) -> list[GrowthEvent]:
        """Contributions ``of`` slots, at most so many: those measured longest ago."""
        table = self._body.table
        waiting = np.where(table.epochs_since_measured[0] < 0, UNLIMITED, table.epochs_since_measured[0])
        chosen = sorted(np.flatnonzero(of).tolist(), key=lambda i: -int(waiting[i]))[:most]
        uncalibrated = self._calibrate is None and bool(batch_norms(self.net))
        events, values = [], {}
        measured = evaluation.contributions([self._body.slots[i] for i in chosen])
        for index, found in zip(chosen, measured, strict=True):
            value, error = self._agreed(found)
            table.record_contribution(0, index, value, error)
            values[index] = value
            events.append(self._narrator.worth(index, value, error, calibrated=not uncalibrated))
        self.recorder.measured(-evaluation.score.mean, values)
        return events

    def _decide(self, facts: EnvFacts) -> list[GrowthEvent]:
        """Ask the controller and do what it says."""
        assert self._controller is not None
        table = self._body.table
        self._log.append({"facts": asdict(facts), "table": table.plain(), "cost": self._cost})
        actions = self._controller.decide(EpochFacts.stack([facts]), table).actions
        check_actions(actions, 1, table.num_slots)
        slot = int(actions[0, Head.SLOT])
        action = self._agreed(canonicalise(actions, table.alpha[0, [slot]])[0])
        self.recorder.asked(action)
        try:
            outcome = apply_action(self._body, action, self._next_seed)
        except (BlueprintError, HostError) as error:
            outcome = Outcome(False, (), str(error))
        self.recorder.decided(outcome)
        self._last = (int(action[Head.OP]), outcome.succeeded)
        if action[Head.OP] == OP_WAIT:
            return []
        if not outcome.succeeded:
            reason = ", ".join((str(outcome.refused_by), *outcome.failed_checks))
            wish = f"{OP_NAMES[action[Head.OP]]} in {self._body.sites[slot].name}"
            return [self._narrator.refused(slot, f"{self._controller.name} wanted {wish}: {reason}")]
        return self._done(outcome.moves)

    def _done(self, moves: Iterable[StageMove]) -> list[GrowthEvent]:
        """Afterwork of an action: number the seed, count compute anew, tell."""
        told = list(moves)
        for move in told:
            if move.target is Stage.GERMINATED:
                self._next_seed += 1
                self._watch.born(move.slot)
        self.recorder.moved(told)
        if any(move.target in (Stage.GERMINATED, Stage.PRUNED) for move in told):
            self._cost = sites.forward_flops(self.net, self.sample)
        return self._narrator.moves(told)

    def _facts(self, score: float) -> EnvFacts:
        grown = self._body.grown_params()
        host = sum(p.numel() for p in self.net.parameters()) - grown
        op, success = self._last
        return EnvFacts(
            epoch=self._narrator.epoch,
            max_epochs=self._epochs or UNLIMITED,
            train_loss=math.nan,
            train_score=math.nan,
            val_loss=-score,
            val_score=score,
            params=host + grown,
            grown_params=grown,
            param_budget=host + (self._body.max_params or host),
            host_gradient_norm=math.nan,
            minibatches=0,
            last_op=op,
            last_success=success,
            ended=self._narrator.epoch == self._epochs,
            rolled_back=False,
        )

    # --- by hand --------------------------------------------------------------------------------------

    def germinate(
        self, slot: str, blueprint: str, *, style: str = BLEND_IDS[0], alpha: float = 1.0
    ) -> GrowthEvent:
        """Put a new seed into the forward behind ``slot``, and into the optimiser."""
        self._check_unfinished("germinate")
        index, table = self._index(slot), self._body.table
        if style not in BLEND_IDS:
            raise UnknownNameError("style", style, BLEND_IDS)
        blueprint_named(blueprint, self._body.sites[index].topology)
        check_alpha(alpha)
        if not table.occupied[0, index]:
            table.clear(0, index)  # what is said by hand does not wait for an embargo
        number, kind = self._body.action_space.blueprint_names.index(blueprint), BLEND_IDS.index(style)
        params = self._body.germinate(index, number, kind)
        seed = lifecycle.Germination(self._next_seed, number, kind, alpha, 0, params)
        moves = lifecycle.germinate(table, 0, index, seed, self._body.rules)
        self._body.sync()
        return self._done(moves)[0]

    def prune(self, slot: str) -> GrowthEvent:
        """Remove the seed behind ``slot`` from forward and optimiser, with all its state."""
        self._check_unfinished("prune")
        index = self._index(slot)
        self._check_live(index)
        moves = lifecycle.prune(self._body.table, 0, index, self._body.rules, cause="user")
        settle(self._body, moves)
        return self._done(moves)[0]

    def fossilize(self, slot: str) -> GrowthEvent:
        """Make the seed behind ``slot`` permanent; it goes on learning."""
        self._check_unfinished("fossilize")
        index, table = self._index(slot), self._body.table
        self._check_live(index)
        if table.stage[0, index] == Stage.BLENDING:
            lifecycle.enter_next_stage(table, 0, index, self._body.rules, "policy")
        if table.stage[0, index] != Stage.HOLDING:
            alpha = table.alpha[0, index]
            raise SlotError(
                f"{self._narrator.seed(index)} is blended at alpha {alpha:g}; set_alpha('{slot}', 1.0) first"
            )
        verdict = gates.g5_worthy(table, 0, index, LifecycleRules(), finite=self._body.is_finite(index))
        if "weights_finite" in verdict.failed:
            raise SlotError(f"{self._narrator.seed(index)} has weights that are not finite; prune('{slot}')")
        moves = lifecycle.fossilize(table, 0, index, verdict._replace(failed=()), "user")
        return self._done(moves)[0]

    def set_alpha(self, slot: str, alpha: float) -> GrowthEvent:
        """Give the seed behind ``slot`` another weight in the forward, 0 to 1, from the next forward on."""
        self._check_unfinished("set_alpha")
        index, table = self._index(slot), self._body.table
        self._check_live(index)
        check_alpha(alpha)
        lifecycle.set_alpha_target(table, 0, index, target=alpha, epochs=0, curve=AlphaCurve.LINEAR)
        self._body.sync()
        return self._narrator.about("alpha", index, f"is blended at alpha {alpha:g}")

    # --- out and back ---------------------------------------------------------------------------------

    def finish(self, *, merge: bool = True) -> nn.Module:
        """The network as a plain module of its own class, with its seeds in torch modules only.

        What is in the forward stays in it. ``merge`` folds linear seeds behind linear layers into their
        weights. Raises, and leaves the growth as it was, if the result is not what was trained.
        """
        self._check_unfinished("finish")
        self._body.follow_network()
        leave = self._body.membership.leave
        grown = finishing.finish(self.net, self.sample, merge=merge, leave=leave)
        for average in self._body.averaged():
            finishing.finish(average, self.sample, merge=merge, leave=leave)
        self._finished = True
        if grown and hasattr(self.net, "save_pretrained"):
            GrowthWarning.issue(
                "save_pretrained keeps the class's own layers only, and from_pretrained would leave the seeds"
                " out; save the network with torch.save(net, path), load it with torch.load(path,"
                " weights_only=False)"
            )
        return self.net

    def state_dict(self) -> dict[str, Any]:
        """Everything but weights, in plain values; save it beside the states of network and optimiser."""
        return {
            **self._body.state(),
            "epoch": self._narrator.epoch,
            "next_seed": self._next_seed,
            "last": list(self._last),
            "log": self._log,
            "watch": self._watch.state(),
            "controller": getattr(self._controller, "state_dict", dict)(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Build the seeds anew; load the states of network and optimiser after this."""
        self._check_unfinished("load_state_dict")
        self._body.load_state(state)
        self._narrator.epoch, self._next_seed = state["epoch"], state["next_seed"]
        self._last = (int(state["last"][0]), bool(state["last"][1]))
        self._log = list(state["log"])
        self._watch.load_state(state["watch"])
        load_controller = getattr(self._controller, "load_state_dict", None)
        if load_controller is not None:
            load_controller(state["controller"])
        elif self._controller is not None:
            # A controller is what it has seen: it sees it again.
            self._controller.reset(0)
            for entry in self._log:
                self._cost = entry["cost"]
                facts = EpochFacts.stack([EnvFacts(**entry["facts"])])
                self._controller.decide(facts, SlotTable.from_plain(entry["table"]))
        self._cost = sites.forward_flops(self.net, self.sample)

    # --- helpers --------------------------------------------------------------------------------------

    def _check_unfinished(self, what: str) -> None:
        if self._finished:
            raise EsperError(
                f"{what}() came after finish(): the network is a plain module; make a new Growth to go on"
            )

    def _check_live(self, index: int) -> None:
        if not self._body.table.live[0, index]:
            stage = Stage(int(self._body.table.stage[0, index])).name
            raise SlotError(
                f"slot {self._body.sites[index].name} holds no seed that could be changed: it is {stage}"
            )

    @property
    def epoch(self) -> int:
        """Epochs that were ended."""
        return self._narrator.epoch

    @property
    def controller(self) -> Controller | None:
        """Who decides."""
        return self._controller

    @property
    def flops(self) -> float:
        """Of one forward of the sample."""
        return self._cost

    @property
    def sites(self) -> list[sites.Site]:
        """The places of the slots."""
        return self._body.sites

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the slots, in the order in which the forward meets them."""
        return self._body.action_space.slot_config.slot_ids

    def _index(self, slot: str) -> int:
        return self._body.action_space.slot_config.index_of(slot)

    def _agreed(self, value: Any) -> Any:
        """What the first process says, where there are several."""
        return surroundings.from_first(value) if surroundings.is_distributed(self.net) else value
