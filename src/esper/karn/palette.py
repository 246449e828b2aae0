"""Glyph, letter and colour of stages and severities, for terminal, charts and pages.

Colours are from the colour-blind safe set of Okabe and Ito. Glyphs distinguish stages and severities also
without colour. The closer a stage is to FOSSILIZED, the more conspicuous are its colour and glyph.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from esper.leyline.stages import Stage


class Look(NamedTuple):
    """Appearance of a stage or severity: glyph, letter and colour."""

    glyph: str
    """Glyph of the stage or severity, one terminal column wide."""
    letter: str
    """Letter that represents the stage or severity in plain log lines, instead of the glyph."""
    colour: str
    """Colour of the stage or severity as ``#rrggbb``."""


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


class OpLook(NamedTuple):
    """Appearance of an op (kind of action) in charts and texts."""

    stage: Stage
    """Stage that the op leads to; the op is shown with the glyph and colour of this stage. The op WAIT is
    shown like an empty slot.
    """
    label: str
    """Short name of the op for the terminal screen."""
    deed: str
    """End of a sentence about the seed on which the op acted, such as "was fossilized"."""


OPS: Final[Mapping[str, OpLook]] = {
    "WAIT": OpLook(Stage.DORMANT, "wait", "waited"),
    "GERMINATE": OpLook(Stage.GERMINATED, "germ", "germinated"),
    "SET_ALPHA_TARGET": OpLook(Stage.BLENDING, "alpha", "got a new alpha"),
    "PRUNE": OpLook(Stage.PRUNED, "prune", "began to fade out"),
    "FOSSILIZE": OpLook(Stage.FOSSILIZED, "foss", "was fossilized"),
    "ADVANCE": OpLook(Stage.TRAINING, "adv", "was advanced"),
}


def op_look(name: str) -> OpLook:
    """Return the appearance of an op, also of an op that is unknown to this version of Esper."""
    return OPS.get(name, OpLook(Stage.UNKNOWN, name.lower(), name.lower()))


SEVERITIES: Final = {"warning": Look("▲", "W", "#E69F00"), "error": Look("■", "E", "#D55E00")}
_INK_NAMES: Final = ("paper", "ink", "dim", "twin", "ghost", "grid")
_LIGHT: Final = ("#ffffff", "#1c2128", "#5f6974", "#66707b", "#828c97", "#e3e7eb")
_DARK: Final = ("#14181d", "#e8ebee", "#9ba5af", "#aab4be", "#7f8a95", "#2b323a")
INKS: Final = {
    theme: dict(zip(_INK_NAMES, inks, strict=True))
    for theme, inks in {"light": _LIGHT, "dark": _DARK}.items()
}
"""Background and foreground colours of the light and the dark theme.

Contrast with the background is 3:1 for lines of data, 4.5:1 for text, and lower for grid lines.
"""


def stage_variable(stage: Stage) -> str:
    """Return the name of the CSS variable with the colour of a stage."""
    return f"--stage-{stage.name.lower()}"


def css_variables() -> str:
    """Return the palette as CSS variables for the light and the dark theme.

    The theme is that of the reader's system unless the root element has ``data-theme="light"`` or ``"dark"``.
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
