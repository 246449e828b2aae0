import re

import pytest
from rich.cells import cell_len

from esper.karn.drawing.style import STYLE
from esper.karn.palette import INKS, LOOKS
from esper.leyline.stages import Stage

OKABE_ITO = {"#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#999999"}


def test_every_stage_has_a_look():
    assert set(LOOKS) == set(Stage)


def test_glyphs_and_letters_tell_all_stages_apart_without_colour():
    assert len({look.glyph for look in LOOKS.values()}) == 10
    assert len({look.letter for look in LOOKS.values()}) == 10


def test_a_glyph_takes_one_column_and_a_letter_is_ascii():
    assert all(cell_len(look.glyph) == 1 for look in LOOKS.values())
    assert all(look.letter.isascii() for look in LOOKS.values())


def test_colours_are_of_the_colour_blind_safe_set():
    assert {look.colour for look in LOOKS.values()} <= OKABE_ITO


def test_stages_in_which_a_seed_episodes_or_ends_differ_in_colour():
    stages = (
        Stage.GERMINATED,
        Stage.TRAINING,
        Stage.BLENDING,
        Stage.HOLDING,
        Stage.FOSSILIZED,
        Stage.PRUNED,
    )
    assert len({LOOKS[stage].colour for stage in stages}) == 6


# --- what is drawn can be seen ----------------------------------------------------------------------


Colour = tuple[float, ...]
"""Red, green and blue, each from 0 to 1."""


def colour(text: str) -> Colour:
    return tuple(int(text[at : at + 2], 16) / 255 for at in (1, 3, 5))


def mixed(over: Colour, under: Colour, opacity: float) -> Colour:
    return tuple(opacity * a + (1 - opacity) * b for a, b in zip(over, under, strict=True))


def contrast(one: Colour, other: Colour) -> float:
    """As WCAG 2 has it."""

    def luminance(found: Colour) -> float:
        parts = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in found]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True))

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def opacity_of(look: str) -> float:
    (found,) = re.findall(rf"\.esper \.{re.escape(look)}\{{[^}}]*fill-opacity:([.\d]+)", STYLE)
    return float(found)


def test_contrast_is_that_of_the_standard():
    assert contrast(colour("#000000"), colour("#ffffff")) == pytest.approx(21.0)
    assert contrast(colour("#777777"), colour("#ffffff")) == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_lines_and_texts_stand_out_from_the_paper(theme):
    inks = {name: colour(text) for name, text in INKS[theme].items()}

    assert contrast(inks["ink"], inks["paper"]) >= 7
    assert contrast(inks["dim"], inks["paper"]) >= 4.5
    assert contrast(inks["ghost"], inks["paper"]) >= 3


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_twin_stands_out_from_the_paper_and_from_the_bands_it_crosses(theme):
    inks = {name: colour(text) for name, text in INKS[theme].items()}
    outer = mixed(inks["ink"], inks["paper"], opacity_of("fan"))
    inner = mixed(inks["ink"], outer, opacity_of("fan.inner"))
    gained = mixed(inks["ink"], inks["paper"], opacity_of("gain"))

    for ground in (inks["paper"], outer, inner, gained):
        assert contrast(inks["twin"], ground) >= 3
    assert ".esper .twin{stroke:var(--twin)" in STYLE


def test_the_twin_is_as_thick_in_a_narrow_picture_as_in_a_wide_one():
    (twin,) = re.findall(r"\.esper \.twin\{([^}]*)\}", STYLE)

    assert "stroke-width:2;" in twin
    assert "vector-effect:non-scaling-stroke" in twin
