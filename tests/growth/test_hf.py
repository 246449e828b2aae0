"""``GrowthCallback`` in a real ``transformers.Trainer``: growth, bit-equal resumption, best checkpoint."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from esper.growth import GrowthWarning
from esper.hf import GrowthTrainerCallback
from esper.kasmina.state_checks import NOTE
from esper.leyline.errors import EsperError

# Warnings raised by other packages are ignored; warnings of Esper fail a test.
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error::esper.leyline.errors.GrowthWarning"),
]
PLAN = "lora@transformer.h.0:1,norm@transformer.h.1:2"
SAMPLE = {"input_ids": torch.arange(16).view(2, 8)}


class Tokens(torch.utils.data.Dataset):
    def __init__(self, count: int) -> None:
        self.rows = torch.randint(32, (count, 8), generator=torch.Generator().manual_seed(count))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def trainer(folder, callbacks, **settings) -> Trainer:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=2, n_head=2))
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=8,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        **{"eval_strategy": "epoch", "save_strategy": "epoch", "learning_rate": 1e-2}
        | {"num_train_epochs": 3}
        | settings,
    )
    return Trainer(model, arguments, train_dataset=Tokens(32), eval_dataset=Tokens(16), callbacks=callbacks)


def callback(**settings) -> GrowthTrainerCallback:
    known = {"sample": SAMPLE, "slots": ["transformer.h.*"], "controller": PLAN}
    return GrowthTrainerCallback(**known | settings)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train a GPT-2 for three epochs; one seed is planted after the first epoch and one after the second."""
    folder, growing = tmp_path_factory.mktemp("hf"), callback()
    ours = trainer(folder, [growing])
    ours.train()
    return folder, growing, ours


def test_growth_callback_of_transformers_plants_seeds_in_the_planned_slots_and_trains_them(trained):
    _, growing, ours = trained
    model = ours.model
    optimised = {id(p) for group in ours.optimizer.param_groups for p in group["params"]}

    assert growing.growth.slots == ("transformer.h.0", "transformer.h.1")
    assert all(id(p) in optimised for p in model.parameters())
    # The two branches of a new seed have equal weights; training makes the weights of the branches differ.
    seed = model.transformer.h[0].esper_slot.graft.seed
    assert not torch.equal(seed.one[0].weight, seed.other[0].weight)


def test_transformers_training_resumed_between_two_plantings_ends_with_bit_equal_weights(trained):
    folder, _, ours = trained
    model, growing = ours.model, callback()
    again = trainer(folder, [growing])
    again.train(resume_from_checkpoint=str(folder / "checkpoint-8"))

    assert again.model.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(v, model.state_dict()[name]) for name, v in again.model.state_dict().items())

    tokens = Tokens(4).rows
    wanted = again.model(input_ids=tokens).logits
    with pytest.warns(GrowthWarning, match="GPT2LMHeadModel would leave out seeds") as warned:
        plain = growing.finish()
    assert warned[0].filename == __file__
    assert isinstance(plain, GPT2LMHeadModel)
    assert torch.equal(plain(input_ids=tokens).logits, wanted)


BLOCKS = "stack@transformer.h.1:1,stack@transformer.h.0:2"


def test_trainer_resumed_with_inserted_blocks_ends_bit_equal_and_checkpoints_are_larger_models(tmp_path):
    growing = callback(controller=BLOCKS)
    ours = trainer(tmp_path, [growing])
    ours.train()
    model, tokens = ours.model, Tokens(4).rows
    assert model.config.n_layer == 4
    for step in (4, 8):
        again = trainer(tmp_path / "again", [callback(controller=BLOCKS)])
        again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert again.model.state_dict().keys() == model.state_dict().keys()
        assert all(torch.equal(v, model.state_dict()[name]) for name, v in again.model.state_dict().items())

    read = GPT2LMHeadModel.from_pretrained(tmp_path / "checkpoint-12").eval()
    plain = growing.finish().eval()
    assert torch.equal(read(input_ids=tokens).logits, plain(input_ids=tokens).logits)
    assert plain.state_dict().keys() == read.state_dict().keys()


def test_load_best_model_at_end_removes_a_block_that_the_best_checkpoint_does_not_have(tmp_path):
    ours = trainer(
        tmp_path,
        [growing := callback(controller=BLOCKS)],
        load_best_model_at_end=True,
        learning_rate=5e-2,
        metric_for_best_model="eval_loss",
    )
    ours.train()
    best = load_file(f"{ours.state.best_model_checkpoint}/model.safetensors")
    model = growing.finish()

    assert ours.state.best_model_checkpoint.endswith("checkpoint-4")
    assert len(model.transformer.h) == model.config.n_layer == 3
    assert set(best) - set(model.state_dict()) == {NOTE}
    assert all(torch.equal(value, best[name]) for name, value in model.state_dict().items() if name in best)


def test_load_best_model_at_end_restores_weights_and_seeds_of_the_best_checkpoint(tmp_path):
    # On random tokens the evaluation loss rises with training, so the checkpoint of the first epoch is best.
    ours = trainer(
        tmp_path,
        [callback()],
        load_best_model_at_end=True,
        learning_rate=5e-2,
        metric_for_best_model="eval_loss",
    )
    with pytest.warns(GrowthWarning, match=r"no seed in slot transformer\.h\.1; its own was removed"):
        ours.train()
    best = load_file(f"{ours.state.best_model_checkpoint}/model.safetensors")
    model = ours.model.state_dict()

    assert ours.state.best_model_checkpoint.endswith("checkpoint-4")
    assert sum(".graft.alpha" in name for name in model) == 1
    # The weight of lm_head is tied to the embedding, so checkpoints do not contain it.
    assert set(model) - set(best) == {"lm_head.weight"}
    assert all(torch.equal(value, model[name]) for name, value in best.items())


def hits(evaluated) -> dict[str, float]:
    """Return the share of tokens that the logits predict, not shifted by one token."""
    return {"accuracy": float((evaluated.predictions.argmax(-1) == evaluated.label_ids).mean())}


def test_contributions_are_measured_by_the_metric_that_monitor_names(tmp_path):
    growing = callback(monitor="eval_accuracy", mode="max", compute_metrics=hits)
    ours = trainer(tmp_path, [growing], num_train_epochs=2)
    ours.train()
    tokens, model, growth = Tokens(16).rows, ours.model.eval(), growing.growth

    def accuracy() -> float:
        return (model(input_ids=tokens).logits.argmax(-1) == tokens).float().mean().item()

    [first, _] = growth.reports()
    whole, alpha = accuracy(), growth.network.slots[0].held.alpha
    assert growth.facts.val_score == pytest.approx(whole)
    alpha.zero_()
    assert first.counterfactual_contribution == pytest.approx(whole - accuracy(), abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"monitor": "eval_accuracy", "compute_metrics": hits}, "^mode is missing; pass 'min' if the metric"),
        ({"mode": "up"}, "^mode is 'up'; pass 'min' if the metric is a loss"),
        (
            {"monitor": "eval_accuracy", "mode": "max"},
            "without compute_metrics; pass the Trainer's compute_m",
        ),
    ],
)
def test_transformers_callback_refuses_a_monitor_without_its_direction_or_function_at_once(settings, words):
    with pytest.raises(EsperError, match=words):
        callback(**settings)


def test_transformers_callback_names_the_metrics_if_monitor_is_none_of_them(tmp_path):
    growing = callback(monitor="eval_f1", mode="max", compute_metrics=hits)
    with pytest.raises(
        EsperError, match="compute_metrics returns no 'f1'; monitor= allows eval_loss, accura"
    ):
        trainer(tmp_path, [growing], num_train_epochs=1).train()


@pytest.mark.parametrize(
    ("settings", "late", "words"),
    [({"eval_strategy": "no"}, False, "eval_strategy is 'no'"), ({}, True, "after it was made")],
)
def test_trainer_without_evaluation_or_with_a_callback_added_late_is_refused_before_the_first_step(
    tmp_path, settings, late, words
):
    growing = callback()
    ours = trainer(tmp_path, [] if late else [growing], **settings)
    if late:
        ours.add_callback(growing)

    with pytest.raises(EsperError, match=words):
        ours.train()
    assert ours.state.global_step == 0
