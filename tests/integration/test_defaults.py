"""Defaults of all settings; a change of a default must be listed in the CHANGELOG."""

from pydantic import BaseModel

from esper.run.run_config import PRESETS, RunConfig
from esper.simic.config import TrainingConfig

TRAINING = """
task='digits_impaired' data=None rng_seed=0 envs=32 iterations=40 steps=None budget=None slots=None
auto_forward=True vary_slots=False capacity=None context=False hidden_dim=256 critic='state_value'
conditioned=True hold_heads=() reward_family='paired' rent=0.01 reward_scale=5.0 horizon_terminates=True
update_epochs=6 learning_rate=0.001 clip=0.2 clip_per_head=False target_kl=0.03 gamma=None lam=0.95
entropy_start=0.02 entropy_end=0.002 entropy_floor=0.1
value_coefficient=0.5 value_clip=None max_grad_norm=1.0
evaluate_every=5 evaluate_episodes=16 checkpoint_every=1 detail='standard'
devices=('cpu',) policy_device='cpu' amp='off'
"""
RUN = """
task='digits_impaired' controller='heuristic' rng_seed=0 episodes=1 steps=None budget=None slots=()
rotation=() plan='every:1:conv_heavy' incubation_epochs=None auto_forward=True data=None
checkpoint=None against=() detail='full' out=None as_json=False
devices=('cpu',) policy_device='cpu' amp='off'
"""
NAMED = {
    "quick": "task='digits_impaired' envs=8 iterations=10 evaluate_episodes=8",
    "study": "task='digits_impaired' envs=16 iterations=60 evaluate_every=10 evaluate_episodes=24",
    "mixture": "task='digits_mixture' envs=24 iterations=36 context=True hidden_dim=64"
    " update_epochs=16"
    " hold_heads=['style',_'alpha_target',_'alpha_speed',_'alpha_curve'] reward_family='log_loss'"
    " reward_scale=1.0 rent=0.0 evaluate_every=9 evaluate_episodes=24",
    "any_slots": "task='digits_impaired' iterations=80 capacity=8 vary_slots=True",
}


def shown(config: BaseModel) -> set[str]:
    return {f"{name}={value!r}" for name, value in config.model_dump().items()}


def test_defaults_of_run_and_training_settings_are_unchanged() -> None:
    assert shown(TrainingConfig()) == set(TRAINING.split())
    assert shown(RunConfig()) == set(RUN.split())


def test_settings_of_training_presets_are_unchanged() -> None:
    found = {preset: {f"{name}={value!r}" for name, value in own.items()} for preset, own in PRESETS.items()}
    named = {preset: {word.replace("_'", " '") for word in own.split()} for preset, own in NAMED.items()}
    assert found == named
