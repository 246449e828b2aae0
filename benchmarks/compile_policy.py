"""Time of the policy network's methods for choosing actions and for PPO updates, with and without
``torch.compile`` (ADR 0023).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np
import torch

from esper.leyline import (
    BLUEPRINT_NAMES,
    CNN_BLUEPRINTS,
    NUM_HEADS,
    ActionSpace,
    LifecycleRules,
    SlotConfig,
    SlotTable,
)
from esper.tamiyo.networks.factored_lstm import FactoredRecurrentActorCritic
from esper.tamiyo.policy.action_masks import compute_batch_masks

ENVS, SHARD, STEPS, REPEATS = 2, 8, 20, 30
SPACE = ActionSpace(
    SlotConfig.default(), LifecycleRules(), tuple(sorted(int(b) for b in CNN_BLUEPRINTS)), BLUEPRINT_NAMES
)


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds of a function's first call, and the median milliseconds of later calls."""
    began = time.perf_counter()
    call()
    first = time.perf_counter() - began
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return first, 1000 * float(np.median(times))


def main() -> None:
    torch.set_num_threads(1)
    # Code that torch.compile cannot trace runs eagerly instead of raising an error.
    torch._dynamo.config.suppress_errors = True
    logging.disable()
    torch.manual_seed(0)
    policy = FactoredRecurrentActorCritic(state_dim=121, num_slots=3)
    masks = compute_batch_masks(SlotTable.empty(ENVS, 3), SPACE)
    seen = (torch.randn(ENVS, 121), torch.full((ENVS, 3), -1), policy.get_initial_hidden(ENVS), masks)
    uniforms = torch.rand(ENVS, NUM_HEADS)
    decision = policy.get_action(*seen, uniforms=uniforms)

    def repeated(rows: torch.Tensor) -> torch.Tensor:
        return rows[:1].unsqueeze(1).expand(SHARD, STEPS, -1).contiguous()

    stored = (
        torch.randn(SHARD, STEPS, 121),
        torch.full((SHARD, STEPS, 3), -1),
        repeated(decision.actions),
        repeated(decision.masks),
        policy.get_initial_hidden(SHARD),
        torch.zeros(SHARD, STEPS, dtype=torch.bool),
    )

    def act(call: Callable[..., object]) -> Callable[[], object]:
        def run() -> object:
            with torch.no_grad():
                return call(*seen, uniforms=uniforms)

        return run

    def learn(call: Callable[..., object]) -> Callable[[], object]:
        def run() -> object:
            evaluation = call(*stored)
            (evaluation.log_probs.sum() + evaluation.entropies.sum() + evaluation.value.sum()).backward()
            return evaluation

        return run

    for name, method, wrap in (
        ("get_action", policy.get_action, act),
        ("evaluate_actions", policy.evaluate_actions, learn),
    ):
        for kind, call in (("eager", method), ("compiled", torch.compile(method))):
            first, later = timed(wrap(call))
            print(f"{name:18}{kind:10}first call {first:6.1f} s   later calls {later:6.2f} ms", flush=True)


if __name__ == "__main__":
    main()
