"""Grow a transformers model under `transformers.Trainer` with a callback.

python examples/hf_trainer.py
"""

import inspect
import string
import warnings

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from esper.growth import GrowthWarning
from esper.hf import GrowthTrainerCallback, from_pretrained

LENGTH = 32


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    text = torch.tensor([min(ord(c), 127) for c in inspect.getsource(string) + inspect.getsource(inspect)])
    rows = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)[:640]
    rows = rows[torch.randperm(len(rows))]
    examples = [{"input_ids": row, "labels": row} for row in rows]
    config = GPT2Config(
        vocab_size=128, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    arguments = TrainingArguments(
        "runs/hf",
        num_train_epochs=8,
        per_device_train_batch_size=32,
        learning_rate=1e-2,
        eval_strategy="epoch",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )

    # A fixed plan, to show a seed. The default controller plants nothing here, since the loss still falls,
    # and ends a little lower.
    plan = "mlp_small@transformer.h.0:2"
    growth = GrowthTrainerCallback(sample={"input_ids": rows[:2]}, slots="transformer.h.*", controller=plan)
    model = GPT2LMHeadModel(config)
    trainer = Trainer(
        model, arguments, train_dataset=examples[:512], eval_dataset=examples[512:], callbacks=[growth]
    )
    before = model.num_parameters()
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]

    warnings.simplefilter(
        "ignore", GrowthWarning
    )  # finish() warns that GPT2LMHeadModel would not read the seed
    model = growth.finish()
    print(f"{type(model).__name__}: {before:,} → {model.num_parameters():,} parameters, loss {loss:.3f}")
    model.save_pretrained("gpt2")
    assert from_pretrained("gpt2").num_parameters() == model.num_parameters()


if __name__ == "__main__":
    main()
