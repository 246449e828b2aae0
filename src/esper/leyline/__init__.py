"""Contracts: stages, slot table, actions, legality, signals, reports, events. No torch in here."""

from esper.leyline import action_heads, action_tables
from esper.leyline.action_heads import *  # noqa: F403
from esper.leyline.action_tables import *  # noqa: F403
from esper.leyline.errors import EsperError, UnknownNameError
from esper.leyline.events import TABLES, GateVerdict, Row, StageMove
from esper.leyline.factored_actions import FactoredAction
from esper.leyline.legality import legal_slots_by_op
from esper.leyline.protocols import Controller, EventSink
from esper.leyline.reports import SeedStateReport, report_slot, report_slots
from esper.leyline.rules import ActionSpace, LifecycleRules
from esper.leyline.signals import EnvFacts, EpochFacts, TrainingSignals
from esper.leyline.slot_config import SlotConfig
from esper.leyline.slot_table import SlotTable
from esper.leyline.stages import (
    FORWARD_STAGES,
    LEGAL_MOVES,
    LIVE_STAGES,
    NUM_STAGES,
    STAGE_NAMES,
    Stage,
    is_legal_move,
)
from esper.leyline.streams import derive_seed

__all__ = [
    "FORWARD_STAGES",
    "LEGAL_MOVES",
    "LIVE_STAGES",
    "NUM_STAGES",
    "STAGE_NAMES",
    "TABLES",
    "ActionSpace",
    "Controller",
    "EnvFacts",
    "EpochFacts",
    "EsperError",
    "EventSink",
    "FactoredAction",
    "GateVerdict",
    "LifecycleRules",
    "Row",
    "SeedStateReport",
    "SlotConfig",
    "SlotTable",
    "Stage",
    "StageMove",
    "TrainingSignals",
    "UnknownNameError",
    "derive_seed",
    "is_legal_move",
    "legal_slots_by_op",
    "report_slot",
    "report_slots",
]
__all__ += action_heads.__all__
__all__ += action_tables.__all__
