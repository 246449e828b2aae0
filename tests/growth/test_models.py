"""Growth of every network in models.py: outputs with empty slots, training of seeds, finished networks."""

import copy
import json
import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import esper
from esper.growth import GrowthWarning
from esper.kasmina.dry_run import call, tensors_in
from tests.growth.hf_models import HF_CASES
from tests.growth.models import CASES, Case

ALL: dict[str, Case] = CASES | HF_CASES
pytestmark = pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors:UserWarning"
)  # Torch warns that its API of nested tensors is a prototype.
ROOT = Path(__file__).parents[2]


def outputs(net: nn.Module, x: Any) -> list[Tensor]:
    """Return all outputs in eval and train mode, without and with grad, each from the same random state."""
    found = []
    kept = copy.deepcopy(net.state_dict())
    for training in (False, True):
        for grad in (False, True):
            torch.manual_seed(7)
            with torch.set_grad_enabled(grad):
                found += [t.detach().clone() for t in tensors_in(call(net.train(training), x))]
    net.load_state_dict(kept)
    return found


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


class Grown(NamedTuple):
    net: nn.Module
    inputs: Any
    bare_keys: list[str]
    attached: bool
    """Whether outputs and state-dict keys with empty slots equal those of the network without slots."""
    moved: dict[str, bool]
    """For each seed parameter by name, whether training changed the parameter."""
    trained: list[Tensor]
    finished: list[Tensor]


@cache
def grown(name: str) -> Grown:
    """Grow one network; return its outputs with trained seeds and after ``finish``, and which parameters
    changed."""
    case = ALL[name]
    torch.manual_seed(0)
    net, sample, inputs = case.build(), case.sample(), case.sample()
    bare, bare_keys = outputs(net, inputs), list(net.state_dict())
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    places = [place for place, _ in case.seeds]
    growth = esper.Growth(net, optimizer, sample=sample, slots=places, controller=None, mode="max")
    attached = same(outputs(net, inputs), bare) and list(net.state_dict()) == bare_keys
    for place, blueprint in case.seeds:
        growth.germinate(place.partition(":")[0], blueprint)
    seeds = {k: p for k, p in net.named_parameters() if "esper_slot" in k}
    born = {k: p.detach().clone() for k, p in seeds.items()}
    net.train()
    for _ in range(3):
        case.tensor(call(net, sample)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = {k: not torch.equal(p, born[k]) for k, p in seeds.items()}
    trained = outputs(net, inputs)
    with warnings.catch_warnings():
        # The warning that save_pretrained omits seeds is expected.
        warnings.simplefilter("ignore", GrowthWarning)
        finished = growth.finish(merge=False)
    assert finished is net
    return Grown(net, inputs, bare_keys, attached, moved, trained, outputs(net, inputs))


@pytest.mark.parametrize("name", ALL)
def test_empty_slots_change_neither_outputs_nor_state_dict_keys_of_a_network(name: str) -> None:
    assert grown(name).attached


@pytest.mark.parametrize("name", ALL)
def test_training_changes_every_seed_parameter_and_finish_leaves_the_outputs_bit_equal(name: str) -> None:
    found = grown(name)
    assert found.moved
    assert all(found.moved.values()), [k for k, moved in found.moved.items() if not moved]
    assert same(found.finished, found.trained)
    assert not any("esper" in type(m).__module__ for m in found.net.modules())
    assert set(found.bare_keys) < set(found.net.state_dict())
    assert type(found.net) is type(ALL[name].build())


@pytest.mark.parametrize("name", ["resnet-copy", "vit", "padding mask", "gru", "dict", "transformers gpt2"])
# Torch warns about the flat weights of a GRU when a network with a GRU is exported.
@pytest.mark.filterwarnings("ignore:The tensor attributes self.rnn._flat_weights:UserWarning")
def test_finished_network_can_be_exported_by_torch_export(name: str) -> None:
    found = grown(name)
    x = found.inputs
    args, kwargs = (x if isinstance(x, tuple) else (x,), {}) if "transformers" not in name else ((), x)
    exported = torch.export.export(found.net.eval(), args, kwargs).module()
    with torch.no_grad():
        wanted, got = (tensors_in(run(*args, **kwargs)) for run in (found.net, exported))
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("name", ["gru-time-first", "vit-time-first"])
def test_seeds_do_not_mix_samples_if_the_token_axis_precedes_the_batch_axis(name: str) -> None:
    found = grown(name)
    others = torch.cat([found.inputs[:1], torch.randn_like(found.inputs[1:])])
    with torch.no_grad():
        wanted, got = (found.net.eval()(x)[0] for x in (found.inputs, others))
    torch.testing.assert_close(got, wanted)


def test_network_of_one_dimensional_convolutions_with_seeds_accepts_signals_of_another_length() -> None:
    net = grown("signals").net
    assert net.eval()(torch.randn(2, 3, 21)).shape == (2, 2)
    assert net.down.grown.seed.one.get_submodule("0").in_features == 4


READER = """
import json, sys, torch
sys.modules["esper"] = None  # importing it would raise
from tests.growth.hf_models import HF_CASES
from tests.growth.models import CASES
for name, file in json.load(open(sys.argv[1])).items():
    kept = torch.load(file, weights_only=False)
    net = kept["net"]
    net.load_state_dict(torch.load(file + ".state", weights_only=True))
    torch.manual_seed(7)
    x = kept["x"]
    net.eval()
    found = net(**x) if "transformers" in name else net(*x) if type(x) is tuple else net(x)
    got = (CASES | HF_CASES)[name].tensor(found)
    assert torch.equal(got, kept["wanted"]), name
    print(name)
"""


def test_finished_network_loads_in_a_process_without_esper(tmp_path: Path) -> None:
    files = {}
    for number, (name, case) in enumerate(ALL.items()):
        found = grown(name)
        file = files[name] = str(tmp_path / str(number))
        torch.manual_seed(7)
        wanted = case.tensor(call(found.net.eval(), found.inputs)).detach()
        torch.save({"net": found.net, "x": found.inputs, "wanted": wanted}, file)
        torch.save(found.net.state_dict(), f"{file}.state")
    (tmp_path / "files.json").write_text(json.dumps(files))
    (tmp_path / "read.py").write_text(READER)
    run = subprocess.run(
        [sys.executable, str(tmp_path / "read.py"), str(tmp_path / "files.json")],
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split("\n")[:-1] == list(ALL)
