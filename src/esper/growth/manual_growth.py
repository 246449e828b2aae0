"""Slots in a user's network, with seeds that are planted and removed by hand."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from esper.growth.argument_checks import check_alpha
from esper.growth.growth_events import GrowthEvent, Narrator, SanityChecks
from esper.growth.pretrained_files import save_edits_with
from esper.growth.torch_wrappers import FollowedCopies, ProcessGroup, unwrapped
from esper.kasmina import lifecycle, plain
from esper.kasmina.actuator import settle
from esper.kasmina.birth import Births
from esper.kasmina.blueprints import blueprint_named
from esper.kasmina.compute import ComputeLedger, forward_flops
from esper.kasmina.dry_run import call_order
from esper.kasmina.incubation import shadow_loss_of, statistics_of, tensor_norms
from esper.kasmina.network import MorphogeneticModel
from esper.kasmina.optimizer_groups import OptimizerGroups
from esper.kasmina.recorder import Recorder, RowKey
from esper.kasmina.sites import check_modes, find_sites
from esper.kasmina.slot import notice_hooks
from esper.kasmina.transaction import NO_CHANGE, Transaction, all_or_nothing, uninterrupted
from esper.leyline.errors import BlueprintError, EsperError, SlotError, UnknownNameError
from esper.leyline.factored_actions import BLEND_IDS, AlphaCurve
from esper.leyline.reports import SeedStateReport, report_slots
from esper.leyline.rows import StageMove
from esper.leyline.rules import LifecycleRules
from esper.leyline.stages import Stage


class ManualGrowth:
    """Slots in a user's network and the seeds in the slots; ``Growth`` adds measurements and a controller."""

    def __init__(
        self,
        net: nn.Module,
        optimizer: Any,
        sample: Any,
        slots: str | Sequence[str],
        rules: LifecycleRules,
        max_params: int | None,
        follow: Sequence[Any],
    ) -> None:
        self.net, self.sample = unwrapped(net), sample
        order = call_order(self.net, sample)
        groups = OptimizerGroups(optimizer, self.net, order)
        sites = find_sites(self.net, slots, sample, rules.blueprints or None)
        check_modes(self.net, sites, sample)
        token = uuid.uuid4().hex
        self.network = MorphogeneticModel(
            self.net, rules, sites=sites, streams=lambda _: None, token=token, sample=sample
        )
        """Network with its slots; the states of the slots are in ``network.table``."""
        self.slots = self.network.slot_config.slot_ids
        """Names of the slots, in the order of the forward pass."""
        self._copies = FollowedCopies(self.network)
        self.network.max_params = max_params
        self.network.bind(groups)
        for follower in follow:
            self._copies.add(follower)
        self._processes = ProcessGroup(net)
        self.network.followers += [self._processes, self._copies]
        self._space = self.network.action_space
        self.flops = forward_flops(self.net, sample)
        """FLOPs of one forward pass on the sample input."""
        notice_hooks()
        self._narrator = Narrator(self.network)
        self._checks = SanityChecks(self.network, self._narrator)
        self._next_seed, self._finished, self._change = 0, False, NO_CHANGE
        self.recorder = Recorder(self.network.table, lambda: RowKey(0, 0, 0, None, self._narrator.epoch))
        self.ledger = ComputeLedger()

    def _transaction(self) -> Transaction:
        """Return the present state of everything that a method may change."""
        groups = self.network.groups
        own = [self, self.network, self._copies, self._processes, self._narrator, self._checks, self.recorder]
        change = Transaction([self.net, *self._copies.modules], objects=own)
        if groups is not None:
            change.include(optimisers=groups.optimisers, objects=[groups])
        if self._processes.is_active:
            change.keep_containers(self._processes.hooks)
        return change

    @all_or_nothing
    def bind(self, optimizer: Any) -> None:
        """Replace the optimiser, or the optimisers, that train the network and its seeds.

        Args:
            optimizer: New optimiser of the network's parameters, or a list of optimisers.

        Raises:
            HostError: The optimiser does not hold the parameters of the network.
        """
        self._check_unfinished("bind")
        groups = OptimizerGroups(optimizer, self.net, call_order(self.net, self.sample))
        self._change.include(optimisers=groups.optimisers)
        self.network.follow_state()
        self.network.bind(groups)

    @all_or_nothing
    def follow(self, copy: Any) -> None:
        """Plant every present and future seed of the network in ``copy`` as well.

        Args:
            copy: An ``AveragedModel`` or a deep copy of the network.

        Raises:
            HostError: ``copy`` is not a copy of this network.
        """
        self._check_unfinished("follow")
        self._change.include(each for each in [copy] if isinstance(each, nn.Module))
        self._copies.add(copy)

    # --- actions by hand ------------------------------------------------------------------------------

    @all_or_nothing
    def germinate(
        self,
        slot: str,
        blueprint: str,
        *,
        style: str = BLEND_IDS[0],
        alpha: float = 1.0,
        zero: bool = False,
        moments: bool = True,
        renew: float = 1.0,
    ) -> GrowthEvent:
        """Plant a seed after the submodule ``slot`` and add the seed to the optimiser.

        The blueprint ``stack`` inserts a copy of the submodule as a further block, if the submodule is in a
        ``ModuleList`` or ``Sequential``; ``widen`` adds hidden units between the submodule, or layers in it,
        and the next layer.

        Args:
            slot: Name of the slot, which is the name of a submodule.
            blueprint: Name of the seed's blueprint.
            style: Blend style: linear_add, linear_multiply, sigmoid_add or gated_gate.
            alpha: Weight of the seed in the forward pass, from 0 to 1.
            zero: Whether the output projections of a copied block start at zero, so that the output of the
                network does not change.
            moments: Whether the copy of a block also gets a copy of the optimiser state.
            renew: Factor on the matrices of the present blocks of the kind of the copied one; fresh initial
                values times the rest are added. 1 leaves them as they are.

        Returns:
            Event of kind ``germinated``.

        Raises:
            UnknownNameError: There is no slot, blueprint or style of this name.
            BlueprintError: The blueprint does not fit the slot, or all seeds together would exceed
                ``max_params``.
            SlotError: The slot already holds a seed.
        """
        self._check_unfinished("germinate")
        index, table = self._index(slot), self.network.table
        if style not in BLEND_IDS:
            raise UnknownNameError("style", style, BLEND_IDS)
        blueprint_named(blueprint, self.network.sites[index].topology)
        if blueprint not in (named := self.network.rules.blueprints or [blueprint]):
            raise BlueprintError(
                f"blueprint '{blueprint}' is not one of those that this Growth may plant,"
                f" {', '.join(named)}; name it in blueprints="
            )
        check_alpha(alpha)
        if not table.occupied[0, index]:
            table.clear(0, index)  # Planting by hand ignores the embargo of a slot.
        number, kind = self._space.blueprint_names.index(blueprint), BLEND_IDS.index(style)
        if renew != 1.0:
            self._processes.check_single("renew")
            self._change.keep(self.net.parameters())
        params = self.network.germinate(index, number, kind, Births(zero, moments, renew))
        seed = lifecycle.Germination(self._next_seed, number, kind, alpha, 0, params)
        moves = lifecycle.germinate(table, 0, index, seed, self.network.rules)
        self.network.sync()
        return self._done(moves)[0]

    @all_or_nothing
    def prune(self, slot: str) -> GrowthEvent:
        """Remove the seed of ``slot`` from the forward pass, and its state from the optimiser.

        Args:
            slot: Name of the slot.

        Returns:
            Event of kind ``pruned``.

        Raises:
            SlotError: The slot has no seed, or a permanent one.
        """
        index = self._live(slot, "prune")
        moves = lifecycle.prune(self.network.table, 0, index, self.network.rules, cause="user")
        settle(self.network, moves)
        return self._done(moves)[0]

    @all_or_nothing
    def fossilize(self, slot: str) -> GrowthEvent:
        """Make the seed of ``slot`` permanent; a permanent seed continues to learn.

        Args:
            slot: Name of the slot.

        Returns:
            Event of kind ``fossilized``.

        Raises:
            SlotError: The slot has no seed, the seed is not at alpha 1, or a weight is not finite.
        """
        index, table = self._live(slot, "fossilize"), self.network.table
        if table.stage[0, index] == Stage.BLENDING:
            lifecycle.enter_next_stage(table, 0, index, self.network.rules, "policy")
        if table.stage[0, index] != Stage.HOLDING:
            alpha = table.alpha[0, index]
            raise SlotError(
                f"{self._narrator.seed(index)} is blended at alpha {alpha:g}; set_alpha('{slot}', 1.0) first"
            )
        verdict = lifecycle.g5_worthy(table, 0, index, LifecycleRules(), finite=self.network.is_finite(index))
        if "weights_finite" in verdict.failed:
            raise SlotError(f"{self._narrator.seed(index)} has weights that are not finite; prune('{slot}')")
        moves = lifecycle.fossilize(table, 0, index, verdict._replace(failed=()), "user")
        return self._done(moves)[0]

    @all_or_nothing
    def set_alpha(self, slot: str, alpha: float) -> GrowthEvent:
        """Set alpha of the seed in ``slot``, from the next forward pass on.

        Args:
            slot: Name of the slot.
            alpha: Weight of the seed in the forward pass, from 0 to 1.

        Returns:
            Event of kind ``alpha``.

        Raises:
            SlotError: The slot has no seed, or a permanent one.
            EsperError: ``alpha`` is not a number from 0 to 1.
        """
        index, table = self._live(slot, "set_alpha"), self.network.table
        check_alpha(alpha)
        lifecycle.set_alpha_target(table, 0, index, target=alpha, epochs=0, curve=AlphaCurve.LINEAR)
        self.network.sync()
        return self._narrator.about("alpha", index, f"is blended at alpha {alpha:g}")

    @all_or_nothing
    def incubate(self, batch_loss: Callable[[], Tensor]) -> None:
        """Add the gradients of incubating seeds; call ``incubate`` after ``backward`` and before the
        optimiser's ``step``.

        Args:
            batch_loss: Function without arguments that returns the loss of ``net`` on the present batch.
        """
        for slot in self.network.incubating:
            loss = shadow_loss_of(self.network, slot, batch_loss)
            if not math.isfinite(loss.item()):
                continue  # A seed without gradients fails gate G2, so it stays in incubation.
            loss.backward()
            found = statistics_of(
                tensor_norms([p.grad for p in self.network.seed_parameters(slot) if p.grad is not None])
            )
            self.network.table.record_gradients(0, slot, found, ratio=math.nan)

    def _done(self, moves: Iterable[StageMove]) -> list[GrowthEvent]:
        """Record stage moves, count the FLOPs of the changed network, and return the events of the moves."""
        made = list(moves)
        for move in made:
            if move.target is Stage.GERMINATED:
                self._next_seed += 1
                self._checks.born(move.slot)
        self.recorder.moves(made, None)
        if made:
            self._copies.sync()
        if any(move.target in (Stage.GERMINATED, Stage.BLENDING, Stage.PRUNED) for move in made):
            self.flops = forward_flops(self.net, self.sample)
        return self._narrator.moves(made)

    # --- export and state -----------------------------------------------------------------------------

    @all_or_nothing
    def finish(self, *, merge: bool = True) -> nn.Module:
        """Turn the network into a plain module of its own class, with seeds as torch modules.

        Seeds that take part in the forward pass stay in the network; incubating seeds are removed.

        Args:
            merge: Whether to merge a linear seed after a linear layer into the weight of that layer.

        Returns:
            The network itself, as a module without slots.

        Raises:
            HostError: The outputs of the plain module differ from those of the trained network. After this
                error the network is unchanged.
        """
        self._check_unfinished("finish")
        self.network.follow_state()
        for slot in list(self.network.incubating):
            self.prune(self.network.sites[slot].name)
        self._change.keep(plain.slot_weights(self.net))
        plain.finish(self.net, self.sample, merge=merge, groups=self.network.groups)
        for module in self._copies.modules:
            self._change.keep(plain.slot_weights(module))
            plain.finish(module, self.sample, merge=merge)
        self._processes.close()
        self._finished = True
        if hasattr(self.net, "save_pretrained"):
            self._change.keep_containers([vars(self.net)])
            save_edits_with(self.net)
        return self.net

    def abandon(self) -> list[str]:
        """Turn the network into a plain module after an error, without running it or merging seeds.

        Incubating seeds are removed.

        Returns:
            Names of the slots whose seeds cannot be traced; these seeds stay in the network, as modules of
            Esper.
        """
        with uninterrupted():
            if self._finished:
                return []
            for slot in list(self.network.incubating):
                self.network.remove(slot)
            untraced = plain.settle(self.net, self.network.groups)
            untraced += [name for module in self._copies.modules for name in plain.settle(module)]
            self._processes.close()
            self._finished = True
        return untraced

    def save(self, path: Path | str) -> None:
        """Write weights and seeds to ``path``; ``esper.load(path, base=Net())`` returns a plain module.

        Seeds that take part in the forward pass are saved, before and after ``finish``; incubating seeds are
        left out.

        Args:
            path: File to write, in the format safetensors; missing folders are made.

        Raises:
            HostError: The state dict of the network contains something other than tensors.
            SaveError: The file could not be written; an older file at ``path`` is unchanged.
        """
        from esper.kasmina import network_file  # noqa: PLC0415  needed for files only

        network_file.save(self.net, Path(path))

    # --- helpers --------------------------------------------------------------------------------------

    def _check_unfinished(self, what: str) -> None:
        if self._finished:
            raise EsperError(
                f"{what}() came after finish(): the network is a plain module; make a new Growth to go on"
            )

    def _live(self, slot: str, what: str) -> int:
        """Return the index of a slot; raise ``SlotError`` unless it holds a live seed. ``what`` is the name
        of the calling method."""
        self._check_unfinished(what)
        index = self._index(slot)
        if not self.network.table.live[0, index]:
            stage = Stage(int(self.network.table.stage[0, index])).name
            raise SlotError(
                f"slot {self.network.sites[index].name} holds no seed that could be changed: it is {stage}"
            )
        return index

    @property
    def epoch(self) -> int:
        """Number of epochs that have ended."""
        return self._narrator.epoch

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._size()}, {len(self.slots)} slots, epoch {self.epoch})"

    def _size(self) -> str:
        total = sum(p.numel() for p in self.net.parameters())
        own = self.network.grown_params()
        return f"{type(self.net).__name__} with {total:,} parameters, {own:,} of them in seeds"

    def summary(self) -> str:
        """Return a text with parameters and seconds, and a table of all slots: stage, blueprint, age,
        parameters, alpha, contribution with its error, Shapley value."""
        from esper.karn.slot_reports import slot_report_table  # noqa: PLC0415  needed for texts only

        seconds = [f"{purpose} {spent:.3g} s" for purpose, spent in self.ledger.seconds.items()]
        first = "; ".join([f"epoch {self.epoch}: {self._size()}", *seconds])
        return f"{first}\n{slot_report_table(self.reports())}"

    def reports(self) -> list[SeedStateReport]:
        """Return a report of every slot as an object; ``summary`` returns a text table of the same values."""
        return report_slots(self.network.table, 0, self._space)

    def _index(self, slot: str) -> int:
        return self.network.slot_config.index_of(slot)
