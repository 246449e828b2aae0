from rich.cells import cell_len

from esper.karn.palette import LOOKS
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


def test_stages_in_which_a_seed_lives_or_ends_differ_in_colour():
    stages = (
        Stage.GERMINATED,
        Stage.TRAINING,
        Stage.BLENDING,
        Stage.HOLDING,
        Stage.FOSSILIZED,
        Stage.PRUNED,
    )
    assert len({LOOKS[stage].colour for stage in stages}) == 6
