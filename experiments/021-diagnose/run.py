"""Is ``esper.diagnose`` right? Pairs of a network and its data, what is true of them, and what it says.

Truth: a seed at each of three places, trained together with the host as growth does it, against the host
trained longer for the same compute (at most three times the steps), 3 rng seeds each. Pairs are drawn by
number until there are 8 of each kind; the kind is what was measured, not what was meant. Thresholds
of the verdict were set on the selection pairs. The first version was then tried on the first test pairs and
named too few places; the second was made with them in view, and tried once on the second test pairs; the
present one, made with all of these in view, once on test pairs of its own.

Run with ``.venv/bin/python experiments/021-diagnose/run.py truth test`` (10 minutes of CPU; a file keeps what
was measured), ``diagnose test``, and the same for the other sets; ``short`` in the place of ``diagnose`` runs
heats of 20 and 40 batches; ``table`` writes table.md.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pairs import FAMILIES, INTENTS, draw_pair
from torch.utils.data import DataLoader, TensorDataset
from truth import host_loss, host_of, kind_of, longer, measure, values

from esper.growth.diagnosis_report import CandidateRow, decide
from esper.growth.race import Course, Heat
from esper.growth.race_runners import Paired
from esper.karn.statistics import estimate

HERE = Path(__file__).parent
diagnosing = importlib.import_module("esper.growth.diagnose")  # esper.growth.diagnose is also a function
FIRST_NUMBER = {"selection": 0, "first-test": 1000, "second-test": 2000, "test": 3000}
EACH = 8
"""Pairs of each kind."""
KINDS = {"place": "one place is best", "nothing": "nothing helps", "longer": "training longer helps"}
VERDICTS = ("grow", "train longer first", "nowhere", "unclear")
TABLES = {
    "Test pairs": ("test", "test"),
    "Second test pairs, the same version": ("second-test", "second-test"),
    "First test pairs, the same version": ("first-test", "first-test"),
    "Selection pairs": ("selection", "selection"),
    "Second version (three heats, two rates, together only where training longer helps), second test pairs": (
        "second-test",
        "second-test-three-heats",
    ),
    "Second version, first test pairs": ("first-test", "first-test-three-heats"),
    "Second version, selection pairs": ("selection", "selection-three-heats"),
    **{
        f"The present version with heats of 20 and 40 batches, {part} pairs": (part, f"{part}-short")
        for part in ("second-test", "first-test", "selection")
    },
    "First version (all heats behind the frozen host), first test pairs": ("first-test", "first-test-frozen"),
    "First version, selection pairs": ("selection", "selection-frozen"),
}
"""Title, set of pairs, file of diagnoses."""
SHORT = Course((Heat(20, 8, 1 / 3), Heat(40, 2, 1.0)))
STEPS, MINUTES = 1_000_000, 60.0
"""No limits here, so that the table does not depend on the machine."""
diagnosing.DIAGNOSIS_STEPS = STEPS  # type: ignore[misc]  # Heats keep their length.


def measured(part: str, *, fill: bool) -> list[dict[str, Any]]:
    """Pairs and what is true of them, up to ``EACH`` of a kind; with ``fill`` what is missing is measured."""
    file = HERE / f"truth-{part}.jsonl"
    known = {entry["number"]: entry for entry in _read(file)}
    chosen: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    number = FIRST_NUMBER[part]
    while min(map(len, chosen.values())) < EACH and (fill or number <= max(known)):
        intent = INTENTS[number // len(FAMILIES) % len(INTENTS)]
        if len(chosen[intent]) < EACH and (fill or number in known):
            if number not in known:
                known[number] = {"number": number, "intent": intent, "truth": measure(draw_pair(number))}
                _append(file, known[number])
                print(number, intent, *kind_of(known[number]["truth"]), flush=True)
            kind, place = kind_of(known[number]["truth"])
            if kind in chosen and len(chosen[kind]) < EACH:
                chosen[kind].append({**known[number], "kind": kind, "place": place})
        number += 1
    return [entry for entries in chosen.values() for entry in entries]


def diagnosed(part: str, version: str = "") -> None:
    """Diagnose every pair once, as a user would call it, with the places and the blueprint of the truth."""
    file = HERE / f"diagnosis-{part}{version}.jsonl"
    done = {entry["number"] for entry in _read(file)}
    for entry in measured(part, fill=False):
        if entry["number"] in done:
            continue
        pair = draw_pair(entry["number"])
        train = DataLoader(TensorDataset(*pair.train), batch_size=pair.batch, shuffle=True)
        val = DataLoader(TensorDataset(*pair.val), batch_size=128)
        found = diagnosing.diagnose(
            host_of(pair),
            train,
            val,
            loss=pair.loss,
            steps=STEPS,
            minutes=MINUTES,
            slots=list(pair.places),
            blueprints=[pair.blueprint],
            cost="flops",
        )
        _append(file, {"number": entry["number"], **json.loads(found.json())})
        print(
            entry["number"], pair.name, entry["kind"], entry["place"], found.verdict, found.place, flush=True
        )


def decided(said: dict[str, Any]) -> dict[str, Any]:
    """Return a recorded diagnosis with the verdict of the present threshold."""

    def paired(value: dict[str, Any] | None) -> Paired | None:
        return value and Paired(value["mean"], math.nan if value["error"] is None else value["error"])

    names = [field.name for field in fields(CandidateRow)]
    rows = [
        CandidateRow(
            **{name: row[name] for name in names if name in row and name not in ("change", "beyond")}
        )
        for row in said["rows"]
    ]
    rows = [
        replace(row, change=paired(kept["change"]), beyond=paired(kept["beyond"]))
        for row, kept in zip(rows, said["rows"], strict=True)
    ]
    verdict, best, _ = decide(said["val_loss"], rows, paired(said["control"]), said["control_steps"])
    return {**said, "verdict": verdict, "place": best and best.place}


def table(part: str, diagnoses: str) -> str:
    """Verdicts by kind, the bars, and every pair."""
    found = {entry["number"]: entry for entry in _read(HERE / f"diagnosis-{diagnoses}.jsonl")}
    if diagnoses == part:
        found = {number: decided(said) for number, said in found.items()}
    entries = [
        (truth, found[truth["number"]]) for truth in measured(part, fill=False) if truth["number"] in found
    ]
    lines = [
        "| kind | pairs | grow | train longer first | nowhere | unclear | best place named |"
        " by first order alone |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind, words in KINDS.items():
        own = [(truth, said) for truth, said in entries if truth["kind"] == kind]
        verdicts = [said["verdict"] for _, said in own]
        counts = " | ".join(str(verdicts.count(verdict)) for verdict in VERDICTS)
        named = sum(said["place"] == truth["place"] for truth, said in own) if kind == "place" else ""
        first = sum(_by_first_order(said) == truth["place"] for truth, said in own) if kind == "place" else ""
        lines.append(f"| {words} | {len(own)} | {counts} | {named} | {first} |")
    lines += ["", *_advantages(entries), "", *_pairs(entries)]
    return "\n".join(lines) + "\n"


def _advantages(entries: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[str]:
    """What the named place is worth beyond a random one, in per cent of the host's loss."""
    recommended = [_beyond_random(t["truth"], s["place"]) for t, s in entries if s["verdict"] == "grow"]
    of_kind = [(t["truth"], s) for t, s in entries if t["kind"] == "place"]
    raced = [_beyond_random(truth, said["rows"][0]["place"]) for truth, said in of_kind]
    first = [_beyond_random(truth, _by_first_order(said)) for truth, said in of_kind]
    return [
        "| named place | pairs | worth beyond a random place, % of the host's loss |",
        "|---|---|---|",
        f"| recommended (verdict *grow*) | {len(recommended)} | {_interval(recommended)} |",
        f"| first of the race, pairs with a best place | {len(raced)} | {_interval(raced)} |",
        f"| first by first-order score, the same pairs | {len(first)} | {_interval(first)} |",
    ]


def _pairs(entries: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[str]:
    lines = [
        "| pair | network | truth | training longer, % | value of the places, % | verdict | predicted, % |"
        " control, % |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for entry, said in entries:
        truth, pair = entry["truth"], draw_pair(entry["number"])
        host = host_loss(truth)
        worth = " / ".join(f"{100 * value.mean() / host:.0f}" for value in values(truth).values())
        kind = entry["place"] or entry["kind"]
        verdict = f"grow {said['place']}" if said["place"] else said["verdict"]
        best, control = said["rows"][0]["change"]["mean"], said["control"]["mean"]
        lines.append(
            f"| {entry['number']} | {pair.name}, {pair.blueprint} | {kind} |"
            f" {100 * longer(truth).mean() / host:.0f} | {worth} |"
            f" {verdict} | {-100 * best / said['val_loss']:.0f} | {-100 * control / said['val_loss']:.0f} |"
        )
    return lines


def _by_first_order(said: dict[str, Any]) -> str:
    return str(max(said["rows"], key=lambda row: row["first_order"])["place"])


def _beyond_random(truth: dict[str, Any], place: str) -> float:
    worth = {name: 100 * float(value.mean()) / host_loss(truth) for name, value in values(truth).items()}
    return worth[place] - float(np.mean(list(worth.values())))


def _interval(sample: list[float]) -> str:
    return f"{estimate(sample)} (95 %)" if sample else "–"


def _read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _append(file: Path, entry: dict[str, Any]) -> None:
    with file.open("a") as stream:
        stream.write(json.dumps(entry) + "\n")


def main(command: str = "table", part: str = "") -> None:
    torch.set_num_threads(1)
    if command == "truth" and part in FIRST_NUMBER:
        measured(part, fill=True)
    elif command == "diagnose" and part in FIRST_NUMBER:
        diagnosed(part)
    elif command == "short" and part in FIRST_NUMBER:
        diagnosing.DIAGNOSIS = SHORT  # type: ignore[misc]
        diagnosed(part, "-short")
    elif command == "table":
        parts = [f"## {title}\n\n{table(*files)}" for title, files in TABLES.items()]
        (HERE / "table.md").write_text("\n".join(parts))
    else:
        raise SystemExit(f"say truth, diagnose or short and one of {', '.join(FIRST_NUMBER)}, or table")


if __name__ == "__main__":
    main(*sys.argv[1:])
