"""Does a policy react? The same policy, shown what happened in another episode.

A policy that follows a plan of its own decides alike whatever it is shown; one that reacts gets worse.
"""

from collections.abc import Sequence

from esper.leyline import ActionSpace, EpochFacts, SlotTable
from esper.leyline.protocols import Controller, Decisions
from esper.tamiyo.networks.factored_lstm import FactoredRecurrentActorCritic
from esper.tamiyo.policy.controller import decide, policy_outputs
from esper.tamiyo.policy.observer import Observation, Observer


class ObservingController:
    """Decides as ``controller`` does, and keeps what ``policy`` sees meanwhile."""

    name = "observing"

    def __init__(
        self, space: ActionSpace, controller: Controller, policy: FactoredRecurrentActorCritic
    ) -> None:
        self._space, self._controller = space, controller
        slots = space.slot_config.num_slots
        self._observer = Observer(1, slots, policy.num_slots, context=policy.shape.context)
        self.seen: list[Observation] = []

    def reset(self, episode: int) -> None:
        self._observer.reset()
        self._controller.reset(episode)
        self.seen = []

    def decide(self, facts: EpochFacts, table: SlotTable) -> Decisions:
        self.seen.append(self._observer.observe(facts, table, self._space))
        return self._controller.decide(facts, table)


class ShuffledController:
    """Follows a policy that sees the features of another episode, step by step, and its own legal actions."""

    name = "shuffled"

    def __init__(
        self, space: ActionSpace, policy: FactoredRecurrentActorCritic, others: Sequence[Observation]
    ) -> None:
        self._space, self._policy, self._others = space, policy.eval(), others
        self._observer = Observer(1, space.slot_config.num_slots, policy.num_slots)
        self.reset(0)

    def reset(self, episode: int) -> None:
        self._observer.reset()
        self._hidden = self._policy.get_initial_hidden(1)
        self._step = 0

    def decide(self, facts: EpochFacts, table: SlotTable) -> Decisions:
        own = self._observer.observe(facts, table, self._space)
        other = self._others[min(self._step, len(self._others) - 1)]  # an episode may end early
        decision = decide(self._policy, other._replace(masks=own.masks), self._hidden)
        self._hidden = decision.hidden
        self._step += 1
        return Decisions(decision.actions.numpy(), policy_outputs(decision, self._policy.sizes))
