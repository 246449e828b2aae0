"""``contribution`` and ``loss`` on tokens, through the real loop: the rewards are what was measured."""

from collections.abc import Sequence

import numpy as np
import pytest
from torch import Tensor, nn

from esper.kasmina.blueprints import blueprint_named
from esper.leyline import BlueprintAction, LifecycleOp
from esper.leyline.slot_table import IntArray
from esper.simic.rewards.families import FamilyName
from tests.contracts.matrix import registered
from tests.simic.episodes import AT_ONCE, SCALE, Episode, played, state_worth
from tests.tolaria.building import WAIT, action, plant, token_task

FAMILIES_OF_TOKENS: tuple[FamilyName, ...] = ("contribution", "loss")
BUSY = [
    plant(1, BlueprintAction.MLP),
    plant(0, BlueprintAction.ATTENTION),
    action(LifecycleOp.PRUNE, 0),
    WAIT,
    action(LifecycleOp.FOSSILIZE, 1),
    plant(0, BlueprintAction.LORA),
]
"""One seed becomes a fossil, one is pruned, one is held at the horizon or removed by it."""
HELPFUL = [plant(0, BlueprintAction.MLP), plant(1, BlueprintAction.MLP)]


class Deceptive(nn.Linear):
    """Does one thing while it learns, and four times the opposite when it is measured."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        for weight in self.parameters():
            nn.init.zeros_(weight)

    def forward(self, h: Tensor) -> Tensor:
        delta = super().forward(h)
        return delta if self.training else -4.0 * delta


def played_on_tokens(family: FamilyName, script: Sequence[IntArray]) -> Episode:
    """Eight epochs of two environments; ``script`` in the first, nothing in the other."""
    return played(family, script, token_task(rules=AT_ONCE, horizon=8))


def played_with_harm(family: FamilyName) -> Episode:
    """The seed that hurts takes part in the epochs 3, 4 and 5 and is pruned."""
    with registered("deceptive", Deceptive, "tokens"):
        blueprint = BlueprintAction(blueprint_named("deceptive", "tokens").index)
        script = [WAIT, WAIT, plant(0, blueprint), WAIT, WAIT, action(LifecycleOp.PRUNE, 0)]
        return played_on_tokens(family, script)


@pytest.mark.parametrize("family", FAMILIES_OF_TOKENS)
def test_every_term_pays_its_own_change_at_every_step(family: FamilyName) -> None:
    episode = played_on_tokens(family, BUSY)
    assert episode.reports[0].refused == 0
    worth = [state_worth(family, episode, epoch) for epoch in range(len(episode.facts))]
    for name in worth[0]:
        expected = SCALE * np.diff([now[name] for now in worth], axis=0) / 100
        assert episode.terms[name] == pytest.approx(expected, abs=1e-9), name
        assert (episode.terms[name] != 0.0).any(), f"{name} has something to say"
    assert np.isfinite(episode.rewards).all()
    assert sum(episode.terms.values()) == pytest.approx(episode.rewards, abs=1e-12)
    assert np.abs(episode.rewards).max() < SCALE, "no step is worth more than all there is to win"


def test_a_seed_that_helps_is_rewarded_for_what_it_contributes() -> None:
    episode = played_on_tokens("contribution", HELPFUL)
    contributed = np.nansum(episode.tables[-1].contribution[0])
    assert episode.terms["contribution"][:, 0].sum() == pytest.approx(SCALE * contributed / 100)
    assert contributed > 20.0
    assert (episode.terms["contribution"][:, 1] == 0.0).all(), "an episode without seeds gets nothing"


def test_a_seed_that_helps_lowers_the_loss_further() -> None:
    grown = played_on_tokens("loss", HELPFUL).terms["loss"]
    alone = played_on_tokens("loss", []).terms["loss"]
    assert (grown[:, 1] == alone[:, 1]).all(), "nothing grows there in either"
    assert grown[:, 0].sum() > alone[:, 0].sum() > 0.0


def test_a_seed_that_hurts_is_charged_and_its_removal_gives_exactly_that_back() -> None:
    episode = played_with_harm("contribution")
    harm = [table.contribution[0, 0] for table in episode.tables[3:6]]
    assert max(harm) < -5.0
    rewards = episode.terms["contribution"][:, 0]
    assert rewards[2:5].sum() == pytest.approx(SCALE * harm[-1] / 100)
    assert rewards[5] == pytest.approx(-SCALE * harm[-1] / 100)
    assert episode.terms["churn"][:, 0].tolist() == pytest.approx([0, 0, 0, 0, 0, -0.01 * SCALE, 0, 0])
    assert episode.terms["rollback"].sum() == 0.0, "nobody but the controller removed it"


def test_a_seed_that_hurts_costs_loss_and_its_removal_wins_it_back() -> None:
    rewards = played_with_harm("loss").terms["loss"][:, 0]
    assert (rewards[:2] > 0.0).all(), "the host was learning"
    assert (rewards[3:5] < 0.0).all()
    assert rewards[5] > -rewards[3:5].sum()
