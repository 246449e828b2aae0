"""Add blocks to a pretrained Llama for a second kind of text, and save it as an ordinary checkpoint.

    python examples/expand_llama.py

A small Llama learns the characters of Python source code. Two new blocks then learn English prose, while the
old weights are frozen.
"""

import argparse
import inspect
import tarfile
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

import esper

LENGTH, ROWS = 32, 16


def batches(text: str, count: int) -> list[dict[str, Tensor]]:
    """Return batches of random parts of a text, as the model takes them."""
    codes = torch.tensor([min(ord(character), 127) for character in text])
    starts = torch.randint(len(codes) - LENGTH, (count, ROWS, 1))
    return [{"input_ids": x, "labels": x} for x in codes[starts + torch.arange(LENGTH)]]


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[dict[str, Tensor]]) -> None:
    model.train()
    for batch in data:
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


@torch.no_grad()
def written(model: LlamaForCausalLM, start: str) -> str:
    prompt = torch.tensor([[ord(character) for character in start]])
    codes = model.generate(prompt, max_new_tokens=20, do_sample=False)[0]
    return "".join(chr(code) for code in codes.tolist())


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    logging.disable_progress_bar()
    source = "".join(inspect.getsource(module) for module in (argparse, inspect, tarfile))
    prose = "\n".join(topics[key] for key in sorted(topics))
    held_out = {"old": batches(source, 20), "new": batches(prose[-40_000:], 20)}
    lessons = batches(prose[:-40_000], 150)

    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    train(model, torch.optim.AdamW(model.parameters(), lr=5e-3), batches(source, 300))
    before = written(model, "    def ")

    # The outputs are still those of the old model, and only the two new blocks train.
    expanded = esper.expand(model, blocks=2, sample=held_out["new"][0])
    print(expanded)
    optimizer = torch.optim.AdamW(expanded.parameters(), lr=5e-3)
    train(model, optimizer, lessons)

    print("\nnew: English prose, old: Python source")
    print(expanded.report(**held_out, loss=loss))
    with expanded.original():
        assert written(model, "    def ") == before  # The old model is back, bit for bit.

    # Would something else have been better? Every arm starts from the old model.
    rates = {"expanded": [5e-3], "existing": [5e-3], "lora": [5e-3], "full": [5e-3, 5e-4]}
    print(expanded.compare(lessons, **held_out, loss=loss, steps=len(lessons), rates=rates))

    expanded.finish().save_pretrained("llama-expanded")
    read = LlamaForCausalLM.from_pretrained("llama-expanded").eval()
    assert read.config.num_hidden_layers == 5
    sample = held_out["new"][0]
    assert torch.equal(read(**sample).logits, model(**sample).logits)
    print(f"\nllama-expanded: {read.num_parameters():,} parameters, read by transformers without Esper")


if __name__ == "__main__":
    main()
