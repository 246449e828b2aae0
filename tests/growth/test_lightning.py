"""``GrowthCallback`` in a real Lightning trainer: growth, bit-equal resumption, refused settings."""

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from esper.leyline.errors import EsperError
from esper.lightning import GrowthCallback

# Warnings raised by other packages are ignored; warnings of Esper fail a test.
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error::esper.leyline.errors.GrowthWarning"),
]
PLAN = "mlp@net.0:1,lora@net.2:2"


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, _index):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, _index):
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("val_loss", loss)
        self.log_dict({"val_acc": (self(batch[0]).argmax(1) == batch[1]).float().mean()})
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return x + nn.functional.gelu(self.layer(x))


class Blocks(Classifier):
    """Network of two blocks, unless another number is given."""

    def __init__(self, count: int = 2) -> None:
        super().__init__()
        blocks = nn.Sequential(*(Block() for _ in range(count)))
        self.net = nn.Sequential(nn.Linear(4, 8), blocks, nn.Linear(8, 2))


class Silent(Classifier):
    def validation_step(self, batch, _index):
        return None


def loader(count: int) -> DataLoader:
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, 4, generator=generator)
    return DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=8)


def trainer(folder, growing, **settings) -> Trainer:
    seed_everything(0, verbose=False)
    keep = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    settings = {"max_epochs": 4, "accelerator": "cpu", "callbacks": [growing, keep]} | quiet | settings
    return Trainer(**settings)


def callback(**settings) -> GrowthCallback:
    return GrowthCallback(
        **{"sample": torch.zeros(2, 4), "slots": ["net.0", "net.2"], "controller": PLAN} | settings
    )


def test_resumed_lightning_training_ends_with_bit_equal_weights_and_the_same_seeds(tmp_path):
    growing = callback()
    ours = trainer(tmp_path, growing)
    module = Classifier()
    ours.fit(module, loader(32), loader(16))
    x = loader(8).dataset.tensors[0]
    wanted = module(x)
    assert growing.growth.slots == ("net.0", "net.2")
    assert sum(".graft.alpha" in name for name in module.state_dict()) == 2

    other, twin = callback(), Classifier()
    trainer(tmp_path, other).fit(twin, loader(32), loader(16), ckpt_path=tmp_path / "epoch=1.ckpt")
    assert twin.state_dict().keys() == module.state_dict().keys()
    assert all(torch.equal(v, module.state_dict()[name]) for name, v in twin.state_dict().items())
    # Merging the LoRA seed into a weight changes the output by rounding errors.
    torch.testing.assert_close(other.finish()(x), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attribute", [None, "net"])
def test_lightning_training_resumed_between_two_inserted_blocks_ends_with_bit_equal_weights(
    tmp_path, attribute
):
    prefix = "" if attribute else "net."
    plan = f"stack@{prefix}1.1:1,stack@{prefix}1.0:3"
    blocks = {"slots": [f"{prefix}1.0", f"{prefix}1.1"], "controller": plan, "net": attribute}
    ours = trainer(tmp_path, callback(**blocks))
    module = Blocks()
    ours.fit(module, loader(32), loader(16))
    assert len(module.net[1]) == 4

    twin, other = Blocks(), callback(**blocks)
    trainer(tmp_path, other).fit(twin, loader(32), loader(16), ckpt_path=tmp_path / "epoch=1.ckpt")
    assert twin.state_dict().keys() == module.state_dict().keys()
    assert all(torch.equal(v, module.state_dict()[name]) for name, v in twin.state_dict().items())
    other.finish()
    Blocks(4).load_state_dict(twin.state_dict())


class WithoutLoss(Classifier):
    def validation_step(self, batch, index):
        super().validation_step(batch, index)


@pytest.mark.parametrize(("monitor", "mode"), [("val_acc", "max"), ("val_loss", "min")])
def test_contributions_are_measured_by_the_logged_value_that_monitor_names(tmp_path, monitor, mode):
    growing = callback(controller="mlp@net.0:1", monitor=monitor, mode=mode)
    module = WithoutLoss()
    trainer(tmp_path, growing, max_epochs=2).fit(module, loader(64), loader(16))
    growth = growing.growth
    validation = loader(16).dataset.tensors

    def value() -> float:
        output = module.eval()(validation[0])
        if monitor == "val_loss":
            return -nn.functional.cross_entropy(output, validation[1]).item()
        return (output.argmax(1) == validation[1]).float().mean().item()

    [seed] = [report for report in growth.reports() if report.stage.name != "DORMANT"]
    alpha, whole = growth.network.slots[0].held.alpha, value()
    assert growth.facts.val_score == pytest.approx(whole)
    alpha.zero_()
    assert seed.counterfactual_contribution == pytest.approx(whole - value(), abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"monitor": "val_acc"}, "^mode is missing; pass 'min' if the metric is a loss, 'max' if larger"),
        ({"monitor": "val_acc", "mode": "up"}, "^mode is 'up'; pass 'min'"),
    ],
)
def test_lightning_callback_refuses_a_monitor_without_its_direction_at_once(settings, words):
    with pytest.raises(EsperError, match=words):
        callback(**settings)


def test_lightning_callback_names_the_logged_values_if_monitor_is_none_of_them(tmp_path):
    growing = callback(monitor="val_f1", mode="max")
    with pytest.raises(
        EsperError, match="logged no number as 'val_f1'; monitor= allows what it logs: val_lo"
    ):
        trainer(tmp_path, growing, max_epochs=1).fit(Classifier(), loader(32), loader(16))


@pytest.mark.parametrize(
    ("module", "validation", "words"),
    [(Classifier, None, "there is none"), (Silent, loader(16), "returned NoneType")],
)
def test_lightning_training_without_validation_or_without_a_logged_validation_loss_is_refused(
    tmp_path, module, validation, words
):
    with pytest.raises(EsperError, match=words):
        trainer(tmp_path, callback(), max_epochs=1).fit(module(), loader(32), validation)
