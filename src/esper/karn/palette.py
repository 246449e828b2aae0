"""How stages and severities look: glyph, letter and colour, for terminal, figures and pages alike.

Colours are of Okabe and Ito's set, which stays apart for colour-blind readers; glyphs carry the
same information for those who see no colour at all. Both grow heavier as a seed becomes part of
the network.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from esper.leyline.stages import Stage


class Look(NamedTuple):
    glyph: str
    """One column wide in a terminal."""
    letter: str
    """For plain lines, where glyphs may not be readable."""
    colour: str
    """As ``#rrggbb``."""


LOOKS: Final[Mapping[Stage, Look]] = {
    Stage.UNKNOWN: Look("?", "?", "#999999"),
    Stage.DORMANT: Look("·", ".", "#999999"),
    Stage.GERMINATED: Look("∘", "G", "#F0E442"),
    Stage.TRAINING: Look("░", "T", "#E69F00"),
    Stage.BLENDING: Look("▒", "B", "#56B4E9"),
    Stage.HOLDING: Look("▓", "H", "#CC79A7"),
    Stage.FOSSILIZED: Look("◆", "F", "#009E73"),
    Stage.PRUNED: Look("✂", "P", "#D55E00"),
    Stage.EMBARGOED: Look("-", "E", "#999999"),
    Stage.RESETTING: Look("~", "R", "#999999"),
}

OP_STAGES: Final[Mapping[str, Stage]] = {
    "WAIT": Stage.DORMANT,
    "GERMINATE": Stage.GERMINATED,
    "SET_ALPHA_TARGET": Stage.BLENDING,
    "PRUNE": Stage.PRUNED,
    "FOSSILIZE": Stage.FOSSILIZED,
    "ADVANCE": Stage.TRAINING,
}
"""An op looks like the stage it leads to; waiting looks like an empty slot."""


SEVERITIES: Final = {"warning": Look("▲", "W", "#E69F00"), "error": Look("■", "E", "#D55E00")}
_INK_NAMES: Final = ("paper", "ink", "dim", "twin", "ghost", "grid")
_LIGHT: Final = ("#ffffff", "#1c2128", "#5f6974", "#66707b", "#828c97", "#e3e7eb")
_DARK: Final = ("#14181d", "#e8ebee", "#9ba5af", "#aab4be", "#7f8a95", "#2b323a")
INKS: Final = {
    theme: dict(zip(_INK_NAMES, inks, strict=True))
    for theme, inks in {"light": _LIGHT, "dark": _DARK}.items()
}
"""Paper and what is drawn on it. A line that says something stands out from the paper by 3 to 1, text by
4.5 to 1; the grid only helps the eye."""


def stage_variable(stage: Stage) -> str:
    return f"--stage-{stage.name.lower()}"


def css_variables() -> str:
    """The palette as CSS: stages and severities, and paper and inks for light and for dark.

    The reader's system decides, unless the document's root says ``data-theme="light"`` or ``"dark"``.
    """
    fixed = "".join(f"{stage_variable(stage)}:{look.colour};" for stage, look in LOOKS.items())
    fixed += "".join(f"--{severity}:{look.colour};" for severity, look in SEVERITIES.items())
    light, dark = ("".join(f"--{name}:{ink};" for name, ink in inks.items()) for inks in INKS.values())
    return (
        f":root{{color-scheme:light dark;{fixed}{light}}}\n"
        f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}\n"
        f":root[data-theme=light]{{color-scheme:light}}\n"
        f":root[data-theme=dark]{{color-scheme:dark;{dark}}}\n"
    )
