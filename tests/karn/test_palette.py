import re

import pytest
from rich.cells import cell_len

from esper.karn.drawing.picture import STYLE
from esper.karn.palette import INKS, LOOKS
from esper.leyline.stages import Stage

OKABE_ITO = {"#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#999999"}


def test_symbols_and_letters_distinguish_all_seed_stages_without_colour():
    assert len({look.glyph for look in LOOKS.values()}) == 10
    assert len({look.letter for look in LOOKS.values()}) == 10
    assert all(cell_len(look.glyph) == 1 for look in LOOKS.values())
    assert all(look.letter.isascii() for look in LOOKS.values())


def test_colours_of_seed_stages_are_colour_blind_safe_and_distinct():
    assert {look.colour for look in LOOKS.values()} <= OKABE_ITO
    others = {Stage.UNKNOWN, Stage.DORMANT, Stage.EMBARGOED, Stage.RESETTING}
    assert len({LOOKS[stage].colour for stage in set(Stage) - others}) == 6


# --- contrast ---------------------------------------------------------------------------------------


Colour = tuple[float, ...]
"""Colour as red, green and blue, each from 0 to 1."""


def colour(text: str) -> Colour:
    return tuple(int(text[at : at + 2], 16) / 255 for at in (1, 3, 5))


def mixed(over: Colour, under: Colour, opacity: float) -> Colour:
    return tuple(opacity * a + (1 - opacity) * b for a, b in zip(over, under, strict=True))


def contrast(one: Colour, other: Colour) -> float:
    """Return the contrast ratio of two colours as defined by WCAG 2."""

    def luminance(found: Colour) -> float:
        parts = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in found]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True))

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def opacity_of(look: str) -> float:
    (found,) = re.findall(rf"\.esper \.{re.escape(look)}\{{[^}}]*fill-opacity:([.\d]+)", STYLE)
    return float(found)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_lines_and_texts_of_charts_have_enough_contrast_with_the_background(theme):
    inks = {name: colour(text) for name, text in INKS[theme].items()}

    assert contrast(inks["ink"], inks["paper"]) >= 7
    assert contrast(inks["dim"], inks["paper"]) >= 4.5
    assert contrast(inks["ghost"], inks["paper"]) >= 3


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_line_of_twin_scores_in_charts_has_enough_contrast_with_background_and_quantile_bands(theme):
    inks = {name: colour(text) for name, text in INKS[theme].items()}
    outer = mixed(inks["ink"], inks["paper"], opacity_of("fan"))
    inner = mixed(inks["ink"], outer, opacity_of("fan.inner"))

    for ground in (inks["paper"], outer, inner):
        assert contrast(inks["twin"], ground) >= 3
    (twin,) = re.findall(r"\.esper \.twin\{([^}]*)\}", STYLE)
    assert twin.startswith("stroke:var(--twin);stroke-width:2;")
    # The line of twin scores is equally thick in narrow and wide charts.
    assert "vector-effect:non-scaling-stroke" in twin
