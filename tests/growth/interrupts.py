"""Interruptions at chosen lines of Esper, and checks of the network that an interruption leaves behind."""

import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import esper
from esper.growth import Growth

SOURCE = str(Path(esper.__file__).parent)
X = torch.randn(8, 5, generator=torch.Generator().manual_seed(0))
Y = torch.arange(8) % 3
BATCHES = [(X[:4], Y[:4]), (X[4:], Y[4:])]


@contextmanager
def interrupted(line: int, *, signalled: bool = True) -> Iterator[list[int]]:
    """Interrupt the code inside the context when it is about to run its ``line``-th line of Esper.

    The interruption is a real SIGINT, or with ``signalled=False`` an exception that cannot be deferred. Yield
    a list with the number of lines that were run.
    """
    lines = [0]

    def look(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            lines[0] += 1
            if lines[0] == line:
                sys.settrace(None)
                if not signalled:
                    raise KeyboardInterrupt
                signal.raise_signal(signal.SIGINT)
        return look

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        return look if frame.f_code.co_filename.startswith(SOURCE) else None

    sys.settrace(enter)
    try:
        yield lines
    finally:
        sys.settrace(None)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


class Trial:
    """Training that is interrupted: networks, their optimiser, and the public call that is interrupted."""

    def __init__(self, call: str, folder: Path) -> None:
        self.net = network()
        self.nets: list[nn.Module] = [self.net]
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01)
        self.growth: Growth | None = None
        self.scale = 1.0
        """Factor of the metric, to simulate a divergence."""
        self.folder = folder
        self.call: Callable[[], Any] = getattr(self, f"_{call}")()

    def train(self) -> None:
        self.net.train()
        for x, y in BATCHES:
            nn.functional.cross_entropy(self.net(x), y).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def evaluate(self) -> list[float]:
        self.net.eval()
        with torch.no_grad():
            return [self.scale * nn.functional.cross_entropy(self.net(x), y).item() for x, y in BATCHES]

    def started(self, *seeds: tuple[str, str], **known: Any) -> Growth:
        average = AveragedModel(self.net)
        self.nets.append(average)
        known = {"sample": X[:2], "slots": ["0", "2"], "controller": None, "follow": [average]} | known
        self.growth = Growth(self.net, self.optimizer, mode="min", **known)
        for slot, blueprint in seeds:
            self.growth.germinate(slot, blueprint)
        self.train()
        return self.growth

    # --- public calls: each method prepares a trial, and returns the function that is interrupted --------

    def _init(self) -> Callable[[], Any]:
        average = AveragedModel(self.net)
        self.nets.append(average)

        def call() -> None:
            self.growth = Growth(
                self.net, self.optimizer, sample=X[:2], follow=[average], rollback=True, mode="max"
            )

        return call

    def _bind(self) -> Callable[[], Any]:
        growth = self.started(("2", "mlp"))
        host = [p for name, p in self.net.named_parameters() if "esper" not in name]
        self.optimizer = torch.optim.Adam(host, lr=0.01)
        return lambda: growth.bind(self.optimizer)

    def _follow(self) -> Callable[[], Any]:
        other = AveragedModel(self.net)
        self.nets.append(other)
        growth = self.started(("2", "mlp"))
        return lambda: growth.follow(other)

    def _germinate(self) -> Callable[[], Any]:
        growth = self.started(("2", "mlp"))
        return lambda: growth.germinate("0", "mlp_small", style="gated_gate", alpha=0.5)

    def _prune(self) -> Callable[[], Any]:
        growth = self.started(("0", "lora"), ("2", "mlp"))
        return lambda: growth.prune("0")

    def _fossilize(self) -> Callable[[], Any]:
        growth = self.started(("2", "mlp"))
        return lambda: growth.fossilize("2")

    def _set_alpha(self) -> Callable[[], Any]:
        growth = self.started(("2", "mlp"))
        return lambda: growth.set_alpha("2", 0.25)

    def _raise_rank(self) -> Callable[[], Any]:
        growth = self.started(("0", "lora"), ("2", "mlp"))
        return lambda: growth.raise_rank("0", 12)

    def _incubate(self) -> Callable[[], Any]:
        growth = self.started(("2", "mlp"), incubation_epochs=2)
        self.net.train()
        return lambda: growth.incubate(lambda: nn.functional.cross_entropy(self.net(X), Y))

    def _end_epoch(self) -> Callable[[], Any]:
        growth = self.started(("2", "mlp"), controller="mlp_small@0:2", calibrate=[x for x, _ in BATCHES])
        growth.end_epoch(self.evaluate)
        self.train()
        return lambda: growth.end_epoch(self.evaluate)

    def _rollback(self) -> Callable[[], Any]:
        growth = self.started(rollback=True, controller="mlp@0:1")
        for _ in range(3):
            growth.end_epoch(self.evaluate)
            self.train()
        self.scale = float("nan")
        return lambda: growth.end_epoch(self.evaluate)

    def _measure(self) -> Callable[[], Any]:
        growth = self.started(("0", "lora"), ("2", "mlp"))
        return lambda: growth.measure(self.evaluate, shapley=True)

    def _finish(self) -> Callable[[], Any]:
        growth = self.started(("0", "mlp"), ("2", "lora"))
        return growth.finish

    def _load_state_dict(self) -> Callable[[], Any]:
        growth = self.started(("0", "mlp"), controller="lora@2:1")
        state = growth.state_dict()
        growth.end_epoch(self.evaluate)
        growth.prune("0")
        return lambda: growth.load_state_dict(state)

    def _load(self) -> Callable[[], Any]:
        path = self.folder / "net.safetensors"
        growth = Growth(network(), sample=X[:2], slots=["0", "2"], controller=None, mode="max")
        growth.germinate("2", "mlp")
        growth.save(path)
        return lambda: esper.load(path, base=self.net)

    def _plant(self) -> Callable[[], Any]:
        return lambda: esper.plant(self.net, "2", "mlp", sample=X[:2])

    def _diagnose(self) -> Callable[[], Any]:
        loss = nn.functional.cross_entropy
        known = {"optimizer": self.optimizer, "slots": "2", "blueprints": "norm", "steps": 100}
        return lambda: esper.diagnose(self.net, BATCHES, BATCHES, loss=loss, **known)

    def _grow(self, **known: Any) -> Callable[[], Any]:
        average = AveragedModel(self.net)
        self.nets.append(average)
        known = {"epochs": 2, "controller": "mlp@0:1", "follow": [average], "show": len} | known
        loss = nn.functional.cross_entropy
        return lambda: esper.grow(self.net, BATCHES, BATCHES, loss=loss, optimizer=self.optimizer, **known)

    def _incubated_grow(self) -> Callable[[], Any]:
        return self._grow(incubation_epochs=1, epochs=3)

    def _resumed_grow(self) -> Callable[[], Any]:
        whole, out = self.folder / "whole", Path(mkdtemp(dir=self.folder)) / "run"
        if not whole.exists():
            Trial("grow", self.folder)._grow(out=whole)()
        shutil.copytree(whole, out)
        return self._grow(out=out, resume=True)

    # --- checks ---------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return state_of(self.nets, self.optimizer, self.growth)


def state_of(
    nets: Sequence[nn.Module], optimizer: torch.optim.Optimizer, growth: Growth | None
) -> dict[str, Any]:
    """Return copies of all state that a public call must change completely or not at all, by name."""
    names = {id(p): f"{i} {name}" for i, net in enumerate(nets) for name, p in net.named_parameters()}
    state: dict[str, Any] = {
        "random": torch.get_rng_state(),
        "global": (torch.is_grad_enabled(), torch.backends.mha.get_fastpath_enabled()),
        "groups": [
            [names.get(id(p), "stranger") for p in group["params"]] + [group["lr"], "initial_lr" in group]
            for group in optimizer.param_groups
        ],
    }
    for parameter, moments in optimizer.state.items():
        state |= {f"{names.get(id(parameter), 'stranger')} {k}": v.clone() for k, v in moments.items()}
    for number, net in enumerate(nets):
        state |= {f"{number} {name}": value.clone() for name, value in net.state_dict().items()}
        for path, module in net.named_modules():
            hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
            kinds = [type(getattr(hook, "__self__", hook)).__name__ for hook in hooks]
            state[f"module {number} {path}"] = (type(module).__name__, module.training, kinds)
    if growth is not None:
        network = growth.network
        state["growth"] = repr((growth.state_dict(), growth._finished))
        state["seeds"] = [slot.graft is not None for slot in network.slots]
        state["active"] = [slot.graft and slot.graft.participation for slot in network.slots]
        state["known"] = {i: graft is network.slots[i].graft for i, graft in network._known.items()}
    return state


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return the names of the entries in which two states differ."""

    def is_equal(a: Any, b: Any) -> bool:
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            return torch.equal(a.nan_to_num(), b.nan_to_num())
        return type(a) is type(b) and a == b

    return [name for name in {**one, **other} if not is_equal(one.get(name), other.get(name))]


def faults_of_plain(trial: Trial) -> list[str]:
    """Return the traces that an ended or failed ``esper.grow`` wrongly left in networks and optimiser."""
    held = [id(p) for group in trial.optimizer.param_groups for p in group["params"]]
    modules = [(path, module) for net in trial.nets for path, module in net.named_modules()]
    hooks = [hook for _, module in modules for hook in module._forward_hooks.values()]
    names = [[name.removeprefix("module.") for name in net.state_dict()] for net in trial.nets]
    faults = {
        "slot": any("esper_slot" in path for path, _ in modules),
        "hook of a slot": any(type(hook).__name__ != "Grown" for hook in hooks),
        "hook before forward": any(module._forward_pre_hooks for _, module in modules),
        "copy without the seeds": any(set(own) - {"n_averaged"} != set(names[0]) for own in names),
        "optimiser": sorted(held) != sorted(id(p) for p in trial.net.parameters()),
        "state of a stranger": not {id(p) for p in trial.optimizer.state} <= set(held),
        "learning rate": [(g["lr"], "initial_lr" in g) for g in trial.optimizer.param_groups]
        != [(0.01, False)],
        "gradient mode": not torch.is_grad_enabled(),
        "weights that are not finite": not all(bool(p.isfinite().all()) for p in trial.net.parameters()),
    }
    return [fault for fault, is_there in faults.items() if is_there]
