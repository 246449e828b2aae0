import io
import json

from msgspec.structs import replace
from rich.console import Console, RenderableType

from esper.karn.seed_histories import SeedHistory, seed_histories
from esper.karn.summary import as_json, comparison, episode_summary
from esper.leyline.rows import EpisodeRow, RunRow, SeedRow, TransitionRow
from esper.leyline.stages import Stage
from tests.karn import fake_run

RUN = fake_run.run_row()


def seeds() -> list[SeedRow]:
    return [row for row in fake_run.episode() if isinstance(row, SeedRow)]


def transitions() -> list[TransitionRow]:
    return [row for row in fake_run.episode() if isinstance(row, TransitionRow)]


def histories(
    rows: list[SeedRow] | None = None, moves: list[TransitionRow] | None = None, run: RunRow = RUN
) -> list[SeedHistory]:
    """Return the history of each seed, computed from telemetry rows, by default those of ``fake_run``."""
    rows, moves = seeds() if rows is None else rows, transitions() if moves is None else moves
    return seed_histories(run, fake_run.EPOCHS, rows, moves)


def control() -> EpisodeRow:
    flops = {"forward": 500_000_000, "backward": 1_000_000_000}
    scores = {"val_score": 22.0, "test_score": 21.5}
    return replace(fake_run.episode_row(), **scores, params=fake_run.HOST_PARAMS, flops=flops)


def text_of(renderable: RenderableType, width: int = 80) -> str:
    file = io.StringIO()
    Console(file=file, width=width).print(renderable)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


SUMMARY = """\
digits_impaired · heuristic · rng seed 0   8 epochs in 0:00:12
validation  61.5 (best 64.1); twin 22.0, difference +39.5
test        60.2
parameters  250 → 398 (×1.59)
inference   2.00 kFLOP → 25.0 kFLOP a sample (×12)
training    4.00 GFLOP
             1.20 GFLOP  forward
             2.40 GFLOP  backward
              150 MFLOP  validation, not charged
              400 MFLOP  counterfactual
              250 MFLOP  of which pruned seeds

slot seed        born stages     fate                params contribution Shapley
────────────────────────────────────────────────────────────────────────────────
r0c0 conv_light     0 T2 B2 H1 F fossilized             148  +21.9 ± 0.8   +20.5
     linear_add                  at 5
r0c1 conv_heavy     1 T3 B1      pruned               1,200   -3.0 ± 1.2    -2.5
     gated_gate                  at 5: non-finite
                                 loss
r0c2 norm           6 T2         removed                 40            –       –
     sigmoid_add                 at horizon"""

COMPARISON = """\
arm          validation          test       params             compute
──────────────────────────────────────────────────────────────────────
heuristic  61.5 (+39.5)  60.2 (+38.8)  398 (×1.59)  4.00 GFLOP (×2.67)
off                22.0          21.5          250          1.50 GFLOP"""


def test_summary_of_an_episode_has_the_expected_text_of_80_columns():
    shown = text_of(episode_summary(RUN, fake_run.episode_row(), histories()))

    assert shown == SUMMARY


def test_summary_of_an_episode_with_the_longest_names_fits_80_columns():
    run = replace(fake_run.run_row(), blueprints=["flex_attention"] * 13, slots=["r10c10"] * 3)
    measured = {"contribution": -21.9, "contribution_error": 10.8, "shapley": -20.5}
    rows = [replace(row, style=1, params=123_456, **measured) for row in seeds()]
    shown = text_of(episode_summary(run, fake_run.episode_row(), histories(rows, run=run)))

    assert max(map(len, shown.split("\n"))) <= 80
    for whole in ("flex_attention", "linear_multiply", "123,456", "-21.9 ± 10.8", "-20.5"):
        assert whole in shown


def test_summary_of_an_episode_has_the_cause_of_an_early_end_and_omits_zero_flop_entries():
    episode = replace(control(), ended_by="rollback", flops={"forward": 10, "counterfactual": 0})
    shown = text_of(episode_summary(RUN, episode, []))

    assert "ended by    rollback" in shown
    assert "counterfactual" not in shown
    assert shown.endswith("no seed germinated")


def test_unknown_values_in_the_summary_of_an_episode_are_dashes():
    episode = replace(fake_run.episode_row(), twin_val_score=None)
    shown = text_of(episode_summary(RUN, episode, histories([])))

    assert "twin –, difference –" in shown
    # Style, parameters, contribution and Shapley value of a seed are unknown without seed rows.
    assert shown.count("–") == 2 + 3 * 4


def test_json_summary_of_an_episode_has_the_last_contribution_and_the_final_state_of_a_seed():
    moves = [
        replace(row, contribution=1.5) if row.seed == 2 and row.to_stage == Stage.PRUNED else row
        for row in transitions()
    ]
    result = as_json(RUN, fake_run.episode_row(), histories(moves=moves))

    assert (result["seeds"][2]["contribution"], result["seeds"][2]["contribution_error"]) == (1.5, None)
    unfinished = [row for row in moves if row.to_stage not in (Stage.PRUNED, Stage.FOSSILIZED)]
    result = as_json(RUN, fake_run.episode_row(), histories(moves=unfinished))
    assert [seed["fate"] for seed in result["seeds"]] == ["alive", "alive", "alive"]


def test_comparison_table_of_arms_shows_differences_from_the_last_arm():
    assert text_of(comparison([("heuristic", fake_run.episode_row()), ("off", control())])) == COMPARISON
    alone = text_of(comparison([("[off]", control())])).split("\n")[-1]
    # Brackets in the name of an arm are printed as text, not read as markup of rich.
    assert alone == "[off]        22.0  21.5     250  1.50 GFLOP"
    many = [(f"static_grown_{number}", fake_run.episode_row()) for number in range(5)]
    assert max(map(len, text_of(comparison(many)).split("\n"))) <= 80


def test_json_summary_of_an_episode_has_the_content_of_the_text_summary():
    result = as_json(RUN, fake_run.episode_row(), histories())
    pruned = result["seeds"][1]

    assert json.loads(json.dumps(result)) == result
    assert result["val_gain_over_twin"] == 39.5
    # Charged FLOPs exclude those of validation; those of pruned seeds are not counted twice.
    assert result["flops_charged"] == 4_000_000_000
    assert result["ops"]["GERMINATE"] == 3
    assert pruned == {
        "slot": "r0c1",
        "blueprint": "conv_heavy",
        "style": "gated_gate",
        "germinated_at": 1,
        "stages": [{"stage": "TRAINING", "epochs": 3}, {"stage": "BLENDING", "epochs": 1}],
        "fate": "pruned",
        "fate_epoch": 5,
        "cause": "governor",
        "reason": "non-finite loss",
        "params": 1200,
        "contribution": -3.0,
        "contribution_error": 1.25,
        "shapley": -2.5,
    }
    assert result["seeds"][2]["contribution"] is None
