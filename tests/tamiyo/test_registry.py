from pathlib import Path

import pytest

from esper.leyline import ActionSpace, LifecycleRules, SlotConfig
from esper.leyline.errors import EsperError, UnknownNameError
from esper.tamiyo.controller_registry import CONTROLLERS, ControllerSettings, make_controller
from esper.tamiyo.networks.factored_lstm import FactoredRecurrentActorCritic
from esper.tamiyo.policy.checkpoint import save_policy
from esper.tamiyo.policy.features import feature_names

SPACE = ActionSpace(SlotConfig.of_count(3), LifecycleRules(), (1,), ("none", "stack"))


@pytest.mark.parametrize("name", CONTROLLERS)
def test_make_controller_returns_the_controller_of_every_registered_name(name: str, tmp_path: Path) -> None:
    save_policy(FactoredRecurrentActorCritic(len(feature_names(3)), 3, hidden_dim=8), tmp_path)
    settings = ControllerSettings(rng_seed=1, plan="stack@r0c0:4", checkpoint=tmp_path)
    assert make_controller(name, SPACE, settings).name == name


def test_make_controller_raises_for_unknown_names_and_missing_settings() -> None:
    with pytest.raises(UnknownNameError, match="did you mean heuristic"):
        make_controller("heuristics", SPACE)
    for name, needed in (("periodic", "needs a plan"), ("ppo", "needs a trained policy")):
        with pytest.raises(EsperError, match=needed):
            make_controller(name, SPACE)
