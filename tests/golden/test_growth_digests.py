"""Weights of grown networks equal the weights that were recorded at commit c0fdec3."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.golden import growth_digests

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("growth_digests.json").read_text())


@pytest.mark.parametrize(("host", "way"), growth_digests.cases())
def test_weights_after_three_epochs_of_growth_equal_recorded_weights(host: str, way: str) -> None:
    found, wanted = (
        growth_digests.digest(growth_digests.grown(host, way)),
        RECORDED["digests"][f"{host}/{way}"],
    )
    assert (found["tensors"], found["flops"]) == (wanted["tensors"], wanted["flops"])
    assert found["squares"] == pytest.approx(wanted["squares"], rel=1e-3)
    assert found["val_loss"] == pytest.approx(wanted["val_loss"], rel=1e-2)
    if growth_digests.machine() == RECORDED["machine"]:  # Last bits of weights depend on the machine.
        assert found["sha256"] == wanted["sha256"]
