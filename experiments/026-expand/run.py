"""What do new blocks gain on new text and lose on old text, against the alternatives of equal size or cost?

A Llama of width 64 with four blocks learns the characters of one corpus for a short or a long time, and is
then trained on another corpus for STEPS steps by each arm. The
learning rate of an arm is the one with the lowest loss on new text at one selection rng seed, separately for
each pair of corpora and each base; then every test rng seed is used once.

Run with ``nice -n 10 .venv/bin/python experiments/026-expand/run.py``. The script continues where it stopped
and writes rows to results.jsonl and the table to table.md beside this file.
"""

from __future__ import annotations

import copy
import json
import random
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from statistics import fmean
from typing import Any, Final

import peft
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import esper
from esper.growth.expand_report import train_arm
from esper.karn.statistics import estimate, paired_difference
from esper.run.factories import one_thread
from esper.tolaria.seeding import SELECTION_SEEDS, TEST_SEEDS

HERE = Path(__file__).parent
RESULTS = HERE / "results.jsonl"
WIDTH, BLOCKS, LENGTH, ROWS = 64, 4, 48, 16
STEPS: Final = 200
BASES: Final = {"short": 200, "long": 1500}
"""Training steps of the base models."""
BASE_RATE: Final = 3e-3
EVALUATED: Final = 32
PAIRS: Final = (("Python", "English"), ("English", "C++"))
SELECTION: Final = SELECTION_SEEDS[2600]
TESTS: Final = TEST_SEEDS[2600:2605]
RATES: Final = (1e-3, 3e-3, 1e-2)

Batch = dict[str, Tensor]


# --- text ---------------------------------------------------------------------------------------------------


def corpus(name: str) -> Tensor:
    """Return the character numbers of a corpus that Python or the packages of this project install."""
    if name == "English":
        text = "\n".join(topics[key] for key in sorted(topics))
    else:
        folder = sysconfig.get_path("stdlib" if name == "Python" else "purelib")
        files = sorted(Path(folder).glob("*.py" if name == "Python" else "torch/include/**/*.h"))
        random.Random(0).shuffle(files)
        text = "\n".join(file.read_text("utf-8", "ignore") for file in files)[:2_000_000]
    return torch.tensor([min(ord(character), 127) for character in text])


def batches(text: Tensor, count: int, rng_seed: int) -> list[Batch]:
    """Return batches of random parts of a text."""
    generator = torch.Generator().manual_seed(rng_seed)
    starts = torch.randint(len(text) - LENGTH, (count, ROWS, 1), generator=generator)
    return [{"input_ids": x, "labels": x} for x in text[starts + torch.arange(LENGTH)]]


class Corpus:
    """Batches of one corpus; the last tenth of the text is held out."""

    def __init__(self, name: str) -> None:
        text = corpus(name)
        self.train_text, held_out = text[: -len(text) // 10], text[-len(text) // 10 :]
        self.held_out = batches(held_out, EVALUATED, 0)

    def training(self, steps: int, rng_seed: int) -> list[Batch]:
        return batches(self.train_text, steps, rng_seed)


def loss(net: nn.Module, batch: Batch) -> Tensor:
    return net(**batch).loss


@torch.no_grad()
def measured(net: nn.Module, data: Sequence[Batch]) -> float:
    net.eval()
    return fmean(float(loss(net, batch)) for batch in data)


# --- arms ---------------------------------------------------------------------------------------------------


def base_model(steps: int, old: Corpus, rng_seed: int) -> LlamaForCausalLM:
    torch.manual_seed(rng_seed)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=BLOCKS,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    net = LlamaForCausalLM(config)
    train_arm(net, list(net.parameters()), old.training(steps, rng_seed), loss, steps, BASE_RATE)
    return net


def new_blocks(count: int) -> Callable[[nn.Module, Batch], list[nn.Parameter]]:
    return lambda net, sample: esper.expand(net, blocks=count, sample=sample).parameters()


def existing_blocks(count: int) -> Callable[[nn.Module, Batch], list[nn.Parameter]]:
    def prepare(net: nn.Module, _sample: Batch) -> list[nn.Parameter]:
        net.requires_grad_(False)
        return [p.requires_grad_(True) for block in net.model.layers[-count:] for p in block.parameters()]

    return prepare


def size_of_new_blocks(net: nn.Module, count: int) -> int:
    return sum(p.numel() for block in net.model.layers[-count:] for p in block.parameters())


def linear_layers(net: nn.Module) -> list[str]:
    return [name for name, m in net.named_modules() if type(m) is nn.Linear and ".layers." in name]


def lora(net: nn.Module, _sample: Batch) -> list[nn.Parameter]:
    """LoRA of the package peft on all linear layers of all blocks, of the size of two new blocks."""
    layers = [net.get_submodule(name) for name in linear_layers(net)]
    rank = round(size_of_new_blocks(net, 2) / sum(each.in_features + each.out_features for each in layers))
    names = sorted({name.rpartition(".")[2] for name in linear_layers(net)})
    adapted = peft.get_peft_model(net, peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=names))
    return [p for p in adapted.parameters() if p.requires_grad]


def everything(net: nn.Module, _sample: Batch) -> list[nn.Parameter]:
    return list(net.parameters())


ARMS: Final[dict[str, Callable[[nn.Module, Batch], list[nn.Parameter]]]] = {
    "1 new block": new_blocks(1),
    "2 new blocks": new_blocks(2),
    "2 existing blocks": existing_blocks(2),
    "LoRA (peft)": lora,
    "full": everything,
    "full, a tenth of the rate": everything,
}


TUNED: Final = {"1 new block": "2 new blocks", "full, a tenth of the rate": "full"}
"""Arms that use the learning rate of another arm, or a tenth of it."""


# --- cells --------------------------------------------------------------------------------------------------


class Study:
    """Rows of all cells, and the base models that were trained in this process."""

    def __init__(self) -> None:
        self.rows = (
            [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
        )
        self._corpora: dict[str, Corpus] = {}
        self._base: tuple[Any, ...] = (None,)

    def corpus(self, name: str) -> Corpus:
        if name not in self._corpora:
            self._corpora[name] = Corpus(name)
        return self._corpora[name]

    def find(self, **wanted: Any) -> dict[str, Any] | None:
        return next((row for row in self.rows if wanted.items() <= row.items()), None)

    def base(
        self, pair: tuple[str, str], base: str, rng_seed: int
    ) -> tuple[LlamaForCausalLM, dict[str, float]]:
        """Return a copy of a base model and its losses; only the last base model is kept."""
        key = (pair, base, rng_seed)
        if self._base[0] != key:
            old, new = self.corpus(pair[0]), self.corpus(pair[1])
            net = base_model(BASES[base], old, rng_seed)
            losses = {"new_before": measured(net, new.held_out), "old_before": measured(net, old.held_out)}
            self._base = (key, net.eval(), losses)
        return copy.deepcopy(self._base[1]), self._base[2]

    def cell(self, pair: tuple[str, str], base: str, rng_seed: int, arm: str, rate: float) -> None:
        known = {"old": pair[0], "new": pair[1], "base": base, "rng_seed": rng_seed, "arm": arm, "rate": rate}
        if self.find(**known):
            return
        old, new = self.corpus(pair[0]), self.corpus(pair[1])
        net, before = self.base(pair, base, rng_seed)
        began = time.process_time()
        sample = {"input_ids": new.held_out[0]["input_ids"][:2]}
        torch.manual_seed(rng_seed)
        parameters = ARMS[arm](net, sample)
        train_arm(net, parameters, new.training(STEPS, rng_seed), loss, STEPS, rate)
        after = {"new_after": measured(net, new.held_out), "old_after": measured(net, old.held_out)}
        row = known | {"trained": sum(p.numel() for p in parameters)} | before | after
        self.rows.append(row | {"seconds": time.process_time() - began})
        with RESULTS.open("a") as file:
            file.write(json.dumps(self.rows[-1]) + "\n")
        print(self.rows[-1], flush=True)

    def best_rate(self, pair: tuple[str, str], base: str, arm: str) -> float:
        """Return the rate of an arm with the lowest loss on new text at the selection rng seed."""
        known = {"old": pair[0], "new": pair[1], "base": base, "rng_seed": SELECTION}
        known["arm"] = TUNED.get(arm, arm)
        found = [row for row in self.rows if known.items() <= row.items()]
        best = min(found, key=lambda row: row["new_after"])["rate"]
        return best / 10 if arm == "full, a tenth of the rate" else best

    def run(self) -> None:
        for base in BASES:
            for pair in PAIRS:
                for arm in [each for each in ARMS if each not in TUNED]:
                    for rate in RATES:
                        self.cell(pair, base, SELECTION, arm, rate)
                for rng_seed in TESTS:
                    for arm in ARMS:
                        self.cell(pair, base, rng_seed, arm, self.best_rate(pair, base, arm))
                self.write_table()

    def write_table(self) -> None:
        """Write means over test rng seeds with 95 % intervals, and paired differences to two new blocks."""
        lines = [
            "Loss per character in nats, mean over paired test rng seeds with 95 % intervals. `gain` is the",
            "loss on new text before minus after, `loss of old` the loss on old text after minus before; the",
            "last two columns are paired differences to `2 new blocks` (negative: lower loss than two new",
            "blocks).",
        ]
        for pair in PAIRS:
            for base in BASES:
                known = {"old": pair[0], "new": pair[1], "base": base}
                rows = [row for row in self.rows if known.items() <= row.items() and row["rng_seed"] in TESTS]
                if rows:
                    lines += self._section(pair, base, rows)
        seconds = sum(row["seconds"] for row in self.rows)
        lines += [
            "",
            f"The trainings of all arms took {seconds / 60:.0f} CPU minutes, without the bases.",
            "",
        ]
        (HERE / "table.md").write_text("\n".join(lines))

    def _section(self, pair: tuple[str, str], base: str, rows: list[dict[str, Any]]) -> list[str]:
        def of(arm: str, get: Callable[[dict[str, Any]], float]) -> list[float]:
            return [get(row) for row in sorted(rows, key=lambda r: r["rng_seed"]) if row["arm"] == arm]

        def shown(found: Any, form: str = ".3f") -> str:
            margin = "–" if found.margin is None else f"{found.margin:.3f}"
            return f"{found.mean:{form}} ± {margin}"

        first = next(iter(ARMS))
        before = [estimate(of(first, lambda row, key=key: row[key])) for key in ("new_before", "old_before")]
        seeds = f"{len({row['rng_seed'] for row in rows})} test rng seeds"
        lines = [
            "",
            f"**{pair[0]} → {pair[1]}, base {base}** ({BASES[base]} steps), {seeds}: before, new"
            f" {shown(before[0])}, old {shown(before[1])}.",
            "",
            "| arm | trained | rate | new | old | gain | loss of old | new, minus 2 new blocks"
            " | old, minus 2 new blocks |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for arm in ARMS:
            found = {key: of(arm, lambda row, key=key: row[key]) for key in ("new_after", "old_after")}
            if not found["new_after"]:
                continue
            changes = [
                estimate(of(arm, lambda row: row["new_before"] - row["new_after"])),
                estimate(of(arm, lambda row: row["old_after"] - row["old_before"])),
            ]
            control = {key: of("2 new blocks", lambda row, key=key: row[key]) for key in found}
            gaps = ["", ""]
            if arm != "2 new blocks":
                size = min(map(len, (*found.values(), *control.values())))
                gaps = [shown(paired_difference(found[k][:size], control[k][:size]), "+.3f") for k in found]
            trained, rate = of(arm, lambda row: row["trained"])[0], of(arm, lambda row: row["rate"])[0]
            cells = [arm, f"{trained:,}", f"{rate:g}", *(shown(estimate(found[k])) for k in found)]
            cells += [shown(changes[0]), shown(changes[1], "+.3f"), *gaps]
            lines.append(f"| {' | '.join(cells)} |")
        return lines


def main() -> None:
    one_thread()
    study = Study()
    if sys.argv[1:] != ["table"]:
        study.run()
    study.write_table()


if __name__ == "__main__":
    main()
