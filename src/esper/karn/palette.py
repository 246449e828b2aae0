"""How stages look: one glyph, one letter and one colour each, for terminal, figures and pages alike.

Colours are of Okabe and Ito's set, which stays apart for colour-blind readers; glyphs carry the
same information for those who see no colour at all. Both grow heavier as a seed becomes part of
the network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from esper.leyline.stages import Stage


@dataclass(frozen=True, slots=True)
class StageLook:
    """Appearance of one stage."""

    glyph: str
    """One column wide in a terminal."""
    letter: str
    """For plain lines, where glyphs may not be readable."""
    colour: str
    """As ``#rrggbb``."""


LOOKS: Final[Mapping[Stage, StageLook]] = MappingProxyType(
    {
        Stage.UNKNOWN: StageLook("?", "?", "#999999"),
        Stage.DORMANT: StageLook("·", ".", "#999999"),
        Stage.GERMINATED: StageLook("∘", "G", "#F0E442"),
        Stage.TRAINING: StageLook("░", "T", "#E69F00"),
        Stage.BLENDING: StageLook("▒", "B", "#56B4E9"),
        Stage.HOLDING: StageLook("▓", "H", "#CC79A7"),
        Stage.FOSSILIZED: StageLook("◆", "F", "#009E73"),
        Stage.PRUNED: StageLook("✂", "P", "#D55E00"),
        Stage.EMBARGOED: StageLook("-", "E", "#999999"),
        Stage.RESETTING: StageLook("~", "R", "#999999"),
    }
)

if set(LOOKS) != set(Stage):
    raise RuntimeError("every stage needs a look and the reverse")
