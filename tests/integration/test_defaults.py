"""The defaults of every setting, spelled out: a change of one is a decision and belongs in the CHANGELOG."""

from esper.config import PRESETS, RunConfig
from esper.simic.config import TrainingConfig


def test_the_defaults_of_a_training() -> None:
    assert TrainingConfig().model_dump() == {
        "task": "digits_impaired",
        "rng_seed": 0,
        "envs": 32,
        "iterations": 40,
        "steps": None,
        "slots": None,
        "vary_slots": False,
        "capacity": None,
        "auto_forward": True,
        "hidden_dim": 256,
        "critic": "state_value",
        "conditioned": True,
        "hold_heads": (),
        "reward_family": "paired",
        "rent": 0.01,
        "reward_scale": 5.0,
        "horizon_terminates": True,
        "update_epochs": 6,
        "learning_rate": 1e-3,
        "clip": 0.2,
        "clip_per_head": False,
        "target_kl": 0.03,
        "gamma": None,
        "lam": 0.95,
        "entropy_start": 0.02,
        "entropy_end": 0.002,
        "entropy_floor": 0.1,
        "value_coefficient": 0.5,
        "value_clip": None,
        "max_grad_norm": 1.0,
        "evaluate_every": 5,
        "evaluate_episodes": 16,
        "checkpoint_every": 5,
        "detail": "standard",
    }
    assert PRESETS == {
        "quick": {"task": "digits_impaired", "envs": 8, "iterations": 10, "evaluate_episodes": 8},
        "study": {
            "task": "digits_impaired",
            "envs": 16,
            "iterations": 60,
            "evaluate_every": 10,
            "evaluate_episodes": 24,
        },
        "any_slots": {"task": "digits_impaired", "iterations": 80, "capacity": 8, "vary_slots": True},
    }


def test_the_defaults_of_a_run() -> None:
    assert RunConfig().model_dump() == {
        "task": "digits_impaired",
        "controller": "heuristic",
        "rng_seed": 0,
        "episodes": 1,
        "steps": None,
        "slots": (),
        "rotation": (),
        "plan": "every:1:conv_heavy",
        "incubation": "shadow",
        "incubation_epochs": None,
        "auto_forward": True,
        "checkpoint": None,
        "against": (),
        "detail": "full",
        "out": None,
        "as_json": False,
    }
