"""Every field of a seed's report changes in a run of the heuristic controller."""

from dataclasses import fields

from esper.leyline import SeedStateReport
from esper.leyline.rows import AlertRow
from esper.tamiyo import HeuristicController
from esper.tolaria.episode import run_episode
from esper.tolaria.tasks import task_named
from esper.tolaria.vector import SerialVector
from tests.tolaria.building import ListSink

MEASURED = (
    *("alpha", "upstream_alpha", "downstream_alpha", "seed_gradient_norm", "seed_gradient_norm_ratio"),
    *("counterfactual_contribution", "contribution_error", "contribution_velocity"),
    *("shapley_value", "interaction_sum", "strongest_boost"),
)


def test_every_field_of_the_seed_report_changes_from_its_default_in_a_heuristic_run() -> None:
    sink = ListSink()
    vector = SerialVector(task_named("digits_impaired"), rng_seed=0, sink=sink)
    vector.reset()
    reports: list[SeedStateReport] = []
    (episode,) = run_episode(
        vector,
        HeuristicController(vector.action_space, 1),
        after_epoch=lambda: reports.extend(vector.envs[0].reports()),
    )
    default = SeedStateReport()
    seen = {field.name: {getattr(report, field.name) for report in reports} for field in fields(default)}
    untouched = [name for name, values in seen.items() if values <= {getattr(default, name)}]
    assert untouched == []

    # A measured field of the report must have at least three different values; otherwise it is nearly
    # constant.
    frozen = [name for name in MEASURED if len(seen[name] - {None}) < 3]
    assert frozen == []
    assert sink.of(AlertRow) == [], "a healthy episode raises no alarm"
    assert (episode.rollbacks, episode.cut_short) == (0, False)
