"""Make golden values (expected results) for tests of the formulas of PPO, with other libraries.

    python tools/make_goldens.py            write tests/golden/*.json, one file per library
    python tools/make_goldens.py --check    compare them with what is installed; exit 1 on a difference

Run this script in a separate environment: stable-baselines3, sb3-contrib and torchrl have dependencies that
Esper does not need. Commands that install stable-baselines3, sb3-contrib and torchrl but keep an installed
torch:

    pip install --no-deps stable-baselines3 sb3-contrib torchrl "tensordict>=0.14.3,<0.15"
    pip install --no-deps gymnasium farama-notifications cloudpickle pandas matplotlib python-dateutil six
    pip install --no-deps hoptorch pyvers orjson importlib_metadata zipp packaging numpy

Golden files store inputs and results, so a test needs neither the library nor its random generator.
"""
# ruff: noqa: PLC0415  each library is imported only where it is used, so one of them is enough

import argparse
import json
import math
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "golden"
TOLERANCE = 1e-5

Case = dict[str, Any]


# --- inputs ----------------------------------------------------------------------------------------


def _numbers(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> list[Any]:
    """Draw normal numbers rounded to three decimals, which float32 and JSON represent alike."""
    return np.round(scale * rng.normal(size=shape), 3).tolist()


def episodes(rng_seed: int, gamma: float, lam: float, *, truncated: bool) -> Case:
    """Draw rollout data ``[env, step]`` of several episodes; with ``truncated`` about half of the episodes
    are truncated.
    """
    rng = np.random.default_rng(rng_seed)
    envs, steps = 4, 12
    ended = rng.random((envs, steps)) < 0.2
    # Environment 0 ends an episode at the last step of the rollout; environment 1 does not.
    ended[0, -1], ended[1, -1] = True, False
    cut = ended & (rng.random((envs, steps)) < 0.5) & truncated
    values = np.array(_numbers(rng, envs, steps))
    reached = np.array(_numbers(rng, envs, steps))  # Critic values of the last states of episodes.
    following = np.concatenate([values[:, 1:], reached[:, -1:]], axis=1)
    return {
        "gamma": gamma,
        "lam": lam,
        "rewards": _numbers(rng, envs, steps),
        "values": values.tolist(),
        "next_values": np.where(ended, reached, following).tolist(),
        "terminated": (ended & ~cut).tolist(),
        "ended": ended.tolist(),
    }


def choices(rng_seed: int, size: int) -> Case:
    """Draw logits ``[row, action]``, masks with one, some or all actions legal, and a legal action per
    row.
    """
    rng = np.random.default_rng(rng_seed)
    rows = 10
    mask = rng.random((rows, size)) < 0.6
    mask[0] = True
    mask[1] = np.arange(size) == 2
    mask[~mask.any(axis=1), 0] = True
    return {
        "logits": _numbers(rng, rows, size, scale=2.0),
        "mask": mask.tolist(),
        "actions": [int(rng.choice(np.flatnonzero(row))) for row in mask],
    }


def updates(rng_seed: int, clip: float, value_clip: float) -> Case:
    """Draw old and new logits ``[row, action]`` so different that PPO ratios are clipped on both sides."""
    rng = np.random.default_rng(rng_seed)
    rows, size = 24, 5
    return {
        "clip": clip,
        "value_clip": value_clip,
        "old_logits": _numbers(rng, rows, size),
        "logits": _numbers(rng, rows, size),
        "actions": rng.integers(0, size, rows).tolist(),
        "advantages": _numbers(rng, rows),
        "old_values": _numbers(rng, rows),
        "values": _numbers(rng, rows),
        "returns": _numbers(rng, rows),
    }


# --- results of the libraries ----------------------------------------------------------------------


def with_stable_baselines3() -> dict[str, list[Case]]:
    """Compute advantages by ``RolloutBuffer`` of stable-baselines3; the last reward of a truncated episode
    includes the discounted value of the next state.
    """
    from gymnasium import spaces
    from stable_baselines3.common.buffers import RolloutBuffer

    def advantages(case: Case) -> list[Any]:
        rewards, values, following = (np.array(case[k]) for k in ("rewards", "values", "next_values"))
        ended, terminated = np.array(case["ended"]), np.array(case["terminated"])
        bootstrapped = rewards + case["gamma"] * following * (ended & ~terminated)
        envs, steps = rewards.shape
        buffer = RolloutBuffer(
            steps,
            spaces.Box(-1.0, 1.0, (1,)),
            spaces.Discrete(2),
            device="cpu",
            gae_lambda=case["lam"],
            gamma=case["gamma"],
            n_envs=envs,
        )
        nothing = np.zeros((envs, 1))
        for step in range(steps):
            starts = ended[:, step - 1] if step else np.ones(envs)
            value = torch.tensor(values[:, step])
            buffer.add(nothing, nothing, bootstrapped[:, step], starts, value, torch.zeros(envs))
        buffer.compute_returns_and_advantage(torch.tensor(following[:, -1]), ended[:, -1])
        return buffer.advantages.T.tolist()

    inputs = [
        episodes(0, 0.97, 0.9, truncated=False),
        episodes(1, 1.0, 0.95, truncated=False),
        episodes(2, 0.97, 0.9, truncated=True),
    ]
    return {"gae": [{**case, "advantages": advantages(case)} for case in inputs]}


def with_sb3_contrib() -> dict[str, list[Case]]:
    """Compute log-probabilities and entropies (in nats, not normalised) by ``MaskableCategorical`` of
    sb3-contrib.
    """
    from sb3_contrib.common.maskable.distributions import MaskableCategorical

    def evaluated(case: Case) -> Case:
        distribution = MaskableCategorical(logits=torch.tensor(case["logits"]), masks=np.array(case["mask"]))
        return {
            **case,
            "log_probs": distribution.log_prob(torch.tensor(case["actions"])).tolist(),
            "entropies": distribution.entropy().tolist(),
            "probs": distribution.probs.tolist(),
        }

    return {"masked": [evaluated(choices(seed, size)) for seed, size in ((3, 6), (4, 13))]}


def with_torchrl() -> dict[str, list[Case]]:
    """Compute, by torchrl, advantages with terminated and truncated episodes, and clipped PPO losses with
    gradients.
    """
    from torchrl.objectives.value.functional import generalized_advantage_estimate

    def advantages(case: Case) -> list[Any]:
        def rows(name: str) -> torch.Tensor:
            return torch.tensor(case[name]).unsqueeze(-1)

        found, _ = generalized_advantage_estimate(
            case["gamma"],
            case["lam"],
            rows("values"),
            rows("next_values"),
            rows("rewards"),
            done=rows("ended"),
            terminated=rows("terminated"),
        )
        return found.squeeze(-1).tolist()

    inputs = [episodes(2, 0.97, 0.9, truncated=True), episodes(5, 1.0, 0.95, truncated=True)]
    return {
        "gae": [{**case, "advantages": advantages(case)} for case in inputs],
        "clipped": [_torchrl_losses(updates(6, 0.2, 0.2)), _torchrl_losses(updates(7, 0.1, 0.5))],
    }


def _torchrl_losses(case: Case) -> Case:
    from tensordict import TensorDict
    from tensordict.nn import TensorDictModule
    from torch.distributions import Categorical
    from torchrl.modules import ProbabilisticActor, ValueOperator
    from torchrl.objectives import ClipPPOLoss

    def identity(source: str, target: str) -> TensorDictModule:
        return TensorDictModule(torch.nn.Identity(), in_keys=[source], out_keys=[target])

    actions = torch.tensor(case["actions"])
    logits = torch.tensor(case["logits"], requires_grad=True)
    values = torch.tensor(case["values"], requires_grad=True)
    actor = ProbabilisticActor(
        identity("observed_logits", "logits"), in_keys=["logits"], distribution_class=Categorical
    )
    critic = ValueOperator(torch.nn.Identity(), in_keys=["observed_value"])
    objective = ClipPPOLoss(
        actor,
        critic,
        clip_epsilon=case["clip"],
        clip_value=case["value_clip"],
        entropy_bonus=False,
        critic_coeff=0.5,
        loss_critic_type="l2",
        normalize_advantage=False,
    )
    old = Categorical(logits=torch.tensor(case["old_logits"])).log_prob(actions)
    batch = TensorDict(
        {
            "observed_logits": logits,
            "observed_value": values.unsqueeze(-1),
            "action": actions,
            objective.tensor_keys.sample_log_prob: old,
            objective.tensor_keys.advantage: torch.tensor(case["advantages"]).unsqueeze(-1),
            objective.tensor_keys.value: torch.tensor(case["old_values"]).unsqueeze(-1),
            objective.tensor_keys.value_target: torch.tensor(case["returns"]).unsqueeze(-1),
        },
        batch_size=[len(actions)],
    )
    losses = objective(batch)
    (logits_gradient,) = torch.autograd.grad(losses["loss_objective"], logits, retain_graph=True)
    (values_gradient,) = torch.autograd.grad(losses["loss_critic"], values)
    return {
        **case,
        "policy_loss": losses["loss_objective"].item(),
        "value_loss": losses["loss_critic"].item(),
        "logits_gradient": logits_gradient.tolist(),
        "values_gradient": values_gradient.tolist(),
    }


# --- files -----------------------------------------------------------------------------------------

LIBRARIES: dict[str, Callable[[], dict[str, list[Case]]]] = {
    "stable_baselines3": with_stable_baselines3,
    "sb3_contrib": with_sb3_contrib,
    "torchrl": with_torchrl,
}


def generate(library: str) -> dict[str, Any]:
    """Return the content of the golden file of one library, computed by its installed version."""
    return {
        "library": library,
        "version": version(library),
        "torch": torch.__version__,
        "script": "tools/make_goldens.py",
        **LIBRARIES[library](),
    }


def load(library: str) -> dict[str, Any]:
    """Return the content of the committed golden file of one library."""
    document: dict[str, Any] = json.loads((FOLDER / f"{library}.json").read_text(encoding="utf-8"))
    return document


def find_differences(found: Any, wanted: Any, at: str = "") -> list[str]:
    """Return the differences beyond the tolerance between the contents of two golden files; versions of
    libraries are not compared.
    """
    if isinstance(wanted, dict):
        names = sorted((set(found) | set(wanted)) - {"version", "torch"})
        pairs = [(found.get(name), wanted.get(name), f"{at}.{name}") for name in names]
    elif isinstance(wanted, list) and isinstance(found, list) and len(found) == len(wanted):
        pairs = [(f, w, f"{at}[{i}]") for i, (f, w) in enumerate(zip(found, wanted, strict=True))]
    elif isinstance(wanted, float) and isinstance(found, float):
        close = math.isclose(found, wanted, rel_tol=0.0, abs_tol=TOLERANCE)
        return [] if close else [f"{at}: {found} instead of {wanted}"]
    else:
        return [] if found == wanted else [f"{at}: {found!r} instead of {wanted!r}"]
    return [line for f, w, place in pairs for line in find_differences(f, w, place)]


def _format(document: dict[str, Any]) -> str:
    """Return the content of a golden file as JSON with one line per field of a test case, so that diffs are
    readable.
    """
    head = {name: value for name, value in document.items() if isinstance(value, str)}
    lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    for name, cases in document.items():
        if name not in head:
            blocks = [
                "    {\n"
                + ",\n".join(f"      {json.dumps(k)}: {json.dumps(v)}" for k, v in case.items())
                + "\n    }"
                for case in cases
            ]
            lines.append(f"  {json.dumps(name)}: [\n" + ",\n".join(blocks) + "\n  ]")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> int:
    """Write the golden files, or compare them with the installed libraries."""
    parser = argparse.ArgumentParser(description="Make or check golden values from other libraries.")
    parser.add_argument(
        "--check", action="store_true", help="compare with the committed files, write nothing"
    )
    check = parser.parse_args().check
    failures = 0
    for library in LIBRARIES:
        document = generate(library)
        if check:
            differences = find_differences(document, load(library), library)
            print("\n".join(differences) or f"{library} {document['version']} agrees")
            failures += bool(differences)
        else:
            (FOLDER / f"{library}.json").write_text(_format(document), encoding="utf-8")
            print(f"{library}.json: {library} {document['version']}, torch {document['torch']}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
