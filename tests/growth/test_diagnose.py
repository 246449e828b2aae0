"""``esper.diagnose`` leaves network and loaders unchanged, ends within its time, and reports a verdict."""

import json
import math
import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import esper
from esper.growth.batch_training import parts_of
from esper.growth.diagnose import diagnose
from esper.growth.diagnosis_report import CandidateRow, Diagnosis, decide
from esper.growth.race_runners import Paired
from esper.leyline.errors import EsperError
from tests.growth.diagnosed import Net, features, loaders

TWO = ["lora", "mlp_small"]
SMALL = nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3), nn.Linear(3, 2))


def everything(net: nn.Module, optimizer: Any, train: Any) -> dict[str, Any]:
    """Return the state of network, optimiser, loader and random generators, comparable by ``==``."""
    return {
        "weights": {name: value.tolist() for name, value in net.state_dict().items()},
        "gradients": {name: p.grad is None or p.grad.tolist() for name, p in net.named_parameters()},
        "learns": {name: p.requires_grad for name, p in net.named_parameters()},
        "modes": {name: module.training for name, module in net.named_modules()},
        "hooks": {name: list(module._forward_hooks) for name, module in net.named_modules()},
        "children": [name for name, _ in net.named_modules()],
        "optimiser": repr(optimizer.state_dict()),
        "loader": train.generator.get_state().tolist(),
        "torch": torch.get_rng_state().tolist(),
        "numpy": repr(np.random.get_state()),  # noqa: NPY002
        "python": random.getstate(),
    }


@pytest.mark.parametrize("interruption", [None, ValueError("no"), KeyboardInterrupt()])
def test_diagnosis_leaves_network_loaders_and_random_states_unchanged_also_when_interrupted(
    interruption: BaseException | None,
) -> None:
    torch.manual_seed(0)
    net = Net()
    net.second.requires_grad_(False)
    net.first[1].eval()
    net.head.register_forward_hook(lambda *_: None)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train, val = loaders(features)
    F.mse_loss(net(torch.randn(4, 5)), torch.randn(4, 2)).backward()
    optimizer.step()
    scheduler.step()
    calls = 0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        random.random()
        np.random.rand()  # noqa: NPY002
        if interruption is not None and calls == 150:
            raise interruption
        return F.mse_loss(output, target)

    before = everything(net, optimizer, train)
    if interruption is None:
        diagnose(net, train, val, loss=loss, optimizer=optimizer, slots=["first", "second"], blueprints=TWO)
    else:
        with pytest.raises((EsperError, KeyboardInterrupt)):
            diagnose(net, train, val, loss=loss, optimizer=optimizer, blueprints=TWO)
    assert calls >= 150
    assert everything(net, optimizer, train) == before


def test_same_network_and_data_give_the_same_diagnosis() -> None:
    torch.manual_seed(0)
    net = Net()
    train, val = loaders(features)
    first, second = (
        diagnose(net, train, val, loss=F.mse_loss, slots="second", blueprints=["lora"], cost="flops")
        for _ in "ab"
    )
    assert first.rows == second.rows
    assert first.control == second.control


# --- verdicts on trained networks ---------------------------------------------------------------------


def linear_but_for_the_head() -> nn.Module:
    """Return a linear network whose second layer has one output, too few for the task."""
    return nn.Sequential(nn.Linear(5, 16), nn.Linear(16, 1), nn.Linear(1, 16), nn.Linear(16, 2))


def train_for(net: nn.Module, steps: int, data: tuple[Tensor, Tensor]) -> nn.Module:
    optimiser = torch.optim.Adam(net.parameters(), lr=5e-3, fused=True)
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = 5e-3 * min(1.0, 2 - 2 * step / steps)
        index = torch.randint(len(data[0]), (32,))
        optimiser.zero_grad()
        F.mse_loss(net(data[0][index]), data[1][index]).backward()
        optimiser.step()
    return net


def test_diagnosis_recommends_a_seed_before_the_layer_that_is_too_narrow() -> None:
    torch.manual_seed(0)
    train, val = loaders(
        lambda *a: (features(*a)[0], features(*a)[0].abs().sum(1, keepdim=True).expand(-1, 2))
    )
    net = train_for(linear_but_for_the_head(), 300, train.dataset.tensors)  # type: ignore[attr-defined]
    found = diagnose(
        net, train, val, loss=F.mse_loss, minutes=5, slots=["0", "1", "2"], blueprints=["mlp_small"]
    )
    assert (found.verdict, found.place, found.blueprint) == ("grow", "0", "mlp_small")
    best = found.rows[0]
    # FLOPs per sample of a seed of width 16: 2 branches of 2 layers with 16² weights, two FLOPs per weight.
    assert (best.parameters, best.flops) == (1088, 2048)
    assert best.gain_per_thousand == pytest.approx(-best.change.mean / 1.088)


def test_diagnosis_of_an_untrained_network_of_sufficient_size_recommends_longer_training() -> None:
    torch.manual_seed(0)
    train, val = loaders(lambda *a: (features(*a)[0], features(*a)[0][:, :2] * 2))
    net = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    found = diagnose(net, train, val, loss=F.mse_loss, minutes=5, slots=["0", "2"], blueprints=["lora"])
    assert found.verdict == "train longer first"
    assert found.place is None


def test_diagnosis_recommends_no_seed_if_targets_are_independent_of_the_inputs() -> None:
    def noise(_net: Any, rng_seed: int, samples: int = 512) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(rng_seed)
        return torch.randn(samples, 5, generator=generator), torch.randn(samples, 2, generator=generator)

    torch.manual_seed(0)
    train, val = loaders(noise)
    net = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 2))
    for weight in net[2].parameters():
        nn.init.zeros_(weight)
    found = diagnose(net, train, val, loss=F.mse_loss, minutes=5, slots="0", blueprints=["lora"])
    assert found.verdict == "nowhere"


def test_candidates_in_a_frozen_network_lower_the_loss_while_the_control_does_not_change() -> None:
    torch.manual_seed(0)
    train, val = loaders(features)
    net = Net().requires_grad_(False)
    found = diagnose(net, train, val, loss=F.mse_loss, minutes=5, slots="second", blueprints=["lora"])
    assert found.control == Paired(0.0, 0.0)
    assert found.rows[0].change is not None
    assert found.rows[0].change.mean < 0


def test_loss_function_of_a_diagnosis_receives_batches_that_are_dicts_unchanged() -> None:
    torch.manual_seed(0)
    train = [{"x": x, "y": y} for x, y in zip(*(t.split(32) for t in features(None, 1, 128)), strict=True)]
    found = diagnose(
        Net(),
        train,
        train,
        loss=lambda net, batch: F.mse_loss(net(batch["x"]), batch["y"]),
        sample=train[0]["x"],
        slots="second",
        blueprints=TWO,
        steps=100,
    )
    assert {row.blueprint for row in found.rows} == set(TWO)
    assert found.cut_short
    assert "It was cut short by its limit." in str(found)


# --- rule of the verdict ------------------------------------------------------------------------------


def row(change: tuple[float, float], beyond: tuple[float, float], steps: int = 100) -> CandidateRow:
    return CandidateRow("here", "lora", 1000, 10, 0.0, Paired(*change), Paired(*beyond), steps, 0.25)


@pytest.mark.parametrize(
    ("best", "control", "verdict"),
    [
        # The validation loss is 1 and the control made 500 steps, so the verdict ignores changes of the loss
        # below 500/1000 of 4 % of it, 0.02.
        (row((-0.30, 0.01), (-0.30, 0.01)), (0.0, 0.01), "grow"),
        (row((-0.30, 0.01), (-0.20, 0.01)), (-0.10, 0.01), "grow"),
        (row((-0.30, 0.01), (-0.02, 0.01)), (-0.28, 0.01), "train longer first"),
        # Longer training lowers the loss by 0.26. The seed adds 0.04, less than half of 0.26.
        (row((-0.30, 0.01), (-0.04, 0.01)), (-0.26, 0.01), "train longer first"),
        (row((-0.10, 0.01), (0.30, 0.01)), (-0.40, 0.01), "train longer first"),
        # The loss decrease of 0.005 exceeds two standard errors but not the threshold of 0.02.
        (row((-0.005, 0.002), (-0.005, 0.002)), (0.0, 0.001), "nowhere"),
        (row((0.2, 0.01), (0.2, 0.01)), (0.1, 0.01), "nowhere"),
        # A decrease of more than four standard errors is certain; it counts from 0.003 on.
        (row((-0.005, 0.001), (-0.0049, 0.001)), (0.0, 0.001), "grow"),
        (row((-0.005, 0.0013), (-0.005, 0.0013)), (0.0, 0.001), "nowhere"),
        (row((-0.0029, 0.0001), (-0.0029, 0.0001)), (0.0, 0.001), "nowhere"),
        (row((0.0, 0.001), (0.005, 0.001)), (-0.005, 0.001), "train longer first"),
        # The loss decrease of 0.20 is less than two standard errors, 2 · 0.15 = 0.30.
        (row((-0.20, 0.15), (-0.20, 0.15)), (0.0, 0.01), "unclear"),
        # The standard error is unknown (NaN) if the validation data has only one chunk.
        (row((-0.20, math.nan), (-0.20, math.nan)), (0.0, math.nan), "unclear"),
    ],
)
def test_verdict_of_a_diagnosis_depends_on_loss_changes_of_candidate_and_control_and_on_their_errors(
    best: CandidateRow, control: tuple[float, float], verdict: str
) -> None:
    assert decide(1.0, [best], Paired(*control), 500)[0] == verdict


def test_loss_must_fall_further_to_count_after_more_training_steps_of_the_control() -> None:
    best, control = row((-0.02, 0.009), (-0.02, 0.009)), Paired(0.0, 0.01)
    assert decide(1.0, [best], control, 450)[0] == "grow"  # 4 % of 450/1000 of the loss is 0.018.
    verdict, _, reason = decide(1.0, [best], control, 600)
    assert verdict == "nowhere"
    assert "lowers the validation loss by 0.024 in 600 steps" in reason


def test_last_heat_of_a_diagnosis_is_longer_if_more_steps_are_allowed() -> None:
    train, val = loaders(features)
    known = {"loss": F.mse_loss, "slots": "second", "blueprints": ["lora"], "cost": "flops"}
    default, longer = (diagnose(Net(), train, val, **known, steps=steps) for steps in (1500, 3000))  # type: ignore[arg-type]
    assert [default.rows[0].steps, longer.rows[0].steps] == [30 + 120, 30 + 240]


def test_diagnosis_recommends_the_candidate_trained_longest_even_if_another_lowers_the_loss_more() -> None:
    long, short = row((-0.3, 0.01), (-0.3, 0.01), 200), row((-0.4, 0.01), (-0.4, 0.01), 50)
    assert decide(1.0, [short, long], Paired(0.0, 0.01), 500)[1] is long


def test_verdict_of_a_diagnosis_is_unclear_if_no_candidate_was_trained() -> None:
    assert decide(1.0, [CandidateRow("here", "lora", 1, 1, 0.5)], None, 500)[0] == "unclear"


@pytest.mark.parametrize("minutes", [0.0, 0.02])
def test_diagnosis_ends_within_the_given_minutes(minutes: float) -> None:
    train, val = loaders(features)
    started = time.process_time()  # not longer than the wall time, and independent of other processes
    found = diagnose(Net(), train, val, loss=F.mse_loss, minutes=minutes, blueprints=TWO)
    assert time.process_time() - started < 60 * minutes + 5
    assert minutes > 0 or found.verdict == "unclear"


# --- refused input ------------------------------------------------------------------------------------


def changing(batches: int) -> Iterator[Any]:
    for index in range(batches):
        yield torch.zeros(4, 5 if index < 8 else 6), torch.zeros(4, 2)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"train_loader": []}, "train_loader is empty"),
        ({"val_loader": []}, "val_loader is empty"),
        ({"train_loader": iter([1])}, "train_loader is an iterator and would be used up"),
        ({"train_loader": 3}, "train_loader is a int, over which nothing can loop"),
        ({"train_loader": list(changing(20))}, r"fails on a batch of shapes \(4, 6\), \(4, 2\)"),
        (
            {"loss": lambda output, target: output - target},
            r"one number as a tensor, and returned a tensor of",
        ),
        ({"loss": lambda output, target: 0.5}, "returned float"),
        ({"loss": lambda output, target: output.sum() * math.nan}, "not a finite number"),
        ({"slots": "layer9"}, "unknown submodule of Net for a slot 'layer9'"),
        ({"blueprints": ["conv_light"]}, "unknown blueprint for features hosts 'conv_light'"),
        ({"blueprints": ["stack"]}, "none of the blueprints fits a place .*; name others"),
        ({"optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters())}, "holds no parameter of the network"),
        ({"steps": 0}, "^steps is 0 and minutes inf; both must be positive"),
        (
            {"net": SMALL, "slots": "0", "blueprints": None},
            r"^every candidate is larger than the network of 32 parameters; .*\['lora', 'mlp_small'\]",
        ),
        ({"optimizer": torch.optim.SGD}, "^optimizer is the class SGD; pass one torch.optim.Optimizer"),
        ({"blueprints": "mpl"}, "unknown blueprint for features hosts 'mpl'; did you mean mlp"),
    ],
)
def test_diagnose_refuses_invalid_arguments_with_a_one_sentence_error(
    change: dict[str, Any], sentence: str
) -> None:
    train, val = loaders(features)
    given = {"train_loader": train, "val_loader": val, "loss": F.mse_loss, "slots": "second"}
    given |= {"blueprints": TWO} | change
    train_loader, val_loader = given.pop("train_loader"), given.pop("val_loader")
    net = given.pop("net", Net())
    with pytest.raises(EsperError, match=sentence):
        diagnose(net, train_loader, val_loader, **given)


# --- text, HTML and JSON ------------------------------------------------------------------------------


def shown() -> Diagnosis:
    rows = [row((-0.301, 0.012), (-0.3, 0.01)), CandidateRow("<there>", "lora", 1000, 2000, 0.25)]
    return Diagnosis(
        "Net", "grow", "here", "lora", "why", 1.0, 0.9, rows, Paired(-0.001, math.nan), 120, 3.0, 1e9
    )


def test_text_of_a_diagnosis_starts_with_the_verdict_and_has_dashes_for_unknown_values() -> None:
    lines = str(shown()).splitlines()
    assert lines[0] == "Net: grow: lora at here"
    assert lines[2] == "tested: lora; places: 2; trained: 1 of 2; weighed by FLOPs."
    assert lines[5].split()[:2] == ["place", "blueprint"]
    assert lines[7].split("  ")[0] == "here"
    assert "-0.301 ± 0.012" in lines[7]
    assert lines[7].split()[-7:] == ["1,000", "10", "FLOP", "25%", "0.301", "0", "100"]
    assert lines[8].split() == ["<there>", "lora", "–", "–", "1,000", "2.00", "kFLOP", "–", "–", "0.25", "0"]


def test_repr_of_a_diagnosis_is_one_short_line_without_the_rows() -> None:
    assert repr(shown()) == "Diagnosis(Net: grow, lora at here; 2 candidates)"


def test_html_of_a_diagnosis_has_a_row_per_candidate_and_escapes_slot_names() -> None:
    page = shown()._repr_html_()
    assert "&lt;there&gt;" in page
    assert page.count("<tr>") == 4


def test_json_of_a_diagnosis_has_null_for_unknown_values() -> None:
    read = json.loads(shown().json())
    assert read["control"] == {"mean": -0.001, "error": None}
    assert read["rows"][1]["change"] is None
    assert read["rows"][0]["gain_per_thousand"] == pytest.approx(0.301)


def test_batch_of_a_nested_dict_is_split_into_dicts_with_the_same_keys() -> None:
    parts = parts_of({"x": torch.arange(5), "k": 3, "n": [torch.arange(10).view(5, 2)]}, 2)
    assert [part["x"].tolist() for part in parts] == [[0, 1], [2, 3, 4]]
    assert [part["n"][0].shape for part in parts] == [(2, 2), (3, 2)]
    assert parts[0]["k"] == 3


# --- planting after the diagnosis ---------------------------------------------------------------------


def test_method_compare_reports_predicted_and_actual_change_of_the_loss_after_planting() -> None:
    torch.manual_seed(0)
    train, val = loaders(
        lambda *a: (features(*a)[0], features(*a)[0].abs().sum(1, keepdim=True).expand(-1, 2))
    )
    net = train_for(linear_but_for_the_head(), 300, train.dataset.tensors)  # type: ignore[attr-defined]
    found = diagnose(net, train, val, loss=F.mse_loss, minutes=5, slots=["0", "1"], blueprints=["mlp_small"])
    x = torch.randn(3, 5)
    before, weights = net(x), sum(p.numel() for p in net.parameters())
    assert found.plant(net, "0", "mlp_small") is net
    assert torch.equal(net(x), before)
    assert sum(p.numel() for p in net.parameters()) == weights + 1088
    assert not any(type(module).__module__.startswith("esper") for module in net.modules())
    train_for(net, 200, train.dataset.tensors)  # type: ignore[attr-defined]
    realised = found.compare(net)
    assert realised.predicted == found.rows[0].change
    # The expected loss is computed in one forward pass over all validation data, not as a mean over chunks.
    mean = F.mse_loss(net(val.dataset.tensors[0]), val.dataset.tensors[1]).item()  # type: ignore[attr-defined]
    assert found.val_loss + realised.realised.mean == pytest.approx(mean, rel=1e-4)
    assert "mlp_small at 0: predicted -" in str(found)
    assert json.loads(found.json())["realised"][0]["place"] == "0"


def test_plant_with_invalid_arguments_is_refused_and_leaves_the_network_unchanged() -> None:
    net = Net()
    keys = list(net.state_dict())
    with pytest.raises(EsperError, match="unknown blueprint"):
        esper.plant(net, "second", "conv_light", sample=torch.zeros(2, 5))
    with pytest.raises(EsperError, match=r"place '\*' names \d submodules \(.*\); name one of them"):
        esper.plant(net, "*", "lora", sample=torch.zeros(2, 5))
    with pytest.raises(EsperError, match="slots is 1; name submodules of Net by text"):
        esper.plant(net, 1, "lora", sample=torch.zeros(2, 5))
    assert list(net.state_dict()) == keys
    esper.plant(net, "second", "lora", sample=torch.zeros(2, 5))
    assert len(net.state_dict()) > len(keys)
