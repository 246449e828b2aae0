"""Lookup tables of actions, and the telemetry rows of decisions, agree index by index."""

import numpy as np
import pytest

from esper.kasmina.actuator import Outcome
from esper.kasmina.recorder import Recorder, RowKey
from esper.leyline import (
    BLEND_IDS,
    BLUEPRINT_IDS,
    OP_NAMES,
    DecisionRow,
    LifecycleOp,
    SlotTable,
    canonicalise,
)
from esper.leyline.factored_actions import HEADS_OF_OP, FactoredAction, Head
from tests.tolaria.building import ListSink


def test_lookup_tables_have_the_specified_names_in_the_specified_order() -> None:
    assert OP_NAMES == ("WAIT", "GERMINATE", "SET_ALPHA_TARGET", "PRUNE", "FOSSILIZE", "ADVANCE")
    assert (
        *(None, "conv_light", "attention", "norm", "depthwise", "bottleneck", "conv_small", "conv_heavy"),
        *("lora", "lora_large", "mlp_small", "mlp", "flex_attention"),
    ) == BLUEPRINT_IDS
    assert BLEND_IDS == ("linear_add", "linear_multiply", "sigmoid_add", "gated_gate")


@pytest.mark.parametrize("op", LifecycleOp)
def test_emitted_action_row_has_the_indices_of_the_factored_action(op: LifecycleOp) -> None:
    sink, alpha = ListSink(), np.array([0.5])
    recorder = Recorder(SlotTable.empty(1, 3), lambda: RowKey(0, 0, 0, None, 4))
    recorder.sink = sink
    action = canonicalise(np.array([[op, 2, 8, 3, 0, 1, 2, 4]]), alpha)[0]
    recorder.decided(action, alpha, np.ones((6, 3), dtype=np.bool_), Outcome(succeeded=True))
    recorder.emit_last_action()
    [row] = sink.of(DecisionRow)
    emitted = FactoredAction.from_indices(row.action)
    assert emitted == FactoredAction.from_indices(action)
    assert (OP_NAMES[row.action[Head.OP]], row.epoch) == (op.name, 4)
    assert emitted.blueprint_id == ("lora" if op is LifecycleOp.GERMINATE else None)
    assert emitted.blend_id == ("gated_gate" if op is LifecycleOp.GERMINATE else "linear_add")
    assert row.read == HEADS_OF_OP[op].tolist()
