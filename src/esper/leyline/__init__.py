"""Contracts between packages: stages, slot table, actions, legality, signals, reports, rows. Importing
``esper.leyline`` does not import torch."""
# ruff: noqa: F403

from esper.leyline.errors import *
from esper.leyline.factored_actions import *
from esper.leyline.reports import *
from esper.leyline.rows import *
from esper.leyline.rules import *
from esper.leyline.signals import *
from esper.leyline.slot_table import *
from esper.leyline.stages import *
from esper.leyline.stream_seeds import *
