"""Telemetry rows of a small run, written by hand instead of recorded from a training.

The run has three slots and eight epochs: one seed is fossilized, one pruned, one removed at the horizon.
"""

from collections.abc import Iterator
from typing import Literal

from esper.leyline import (
    BLUEPRINT_NAMES,
    HEAD_NAMES,
    OP_NAMES,
    STAGE_NAMES,
    BlueprintAction,
    LifecycleOp,
    Stage,
    Style,
)
from esper.leyline.rows import (
    SCHEMA_VERSION,
    AlertRow,
    CounterfactualRow,
    DecisionRow,
    EpisodeRow,
    EpochRow,
    ResourceRow,
    Row,
    RunRow,
    SeedRow,
    TransitionRow,
    UpdateRow,
)
from esper.leyline.rules import ActionSpace, LifecycleRules, SlotConfig

EPOCHS = 8
SLOTS = ["r0c0", "r0c1", "r0c2"]
SPACE = ActionSpace(
    SlotConfig(tuple(SLOTS)), LifecycleRules(), tuple(range(len(BLUEPRINT_NAMES))), BLUEPRINT_NAMES
)
HOST_PARAMS = 250
SCORES = (10.0, 14.0, 22.5, 30.0, 41.0, 47.5, 58.0, 64.1, 62.0)
TWIN_SCORES = (10.0, 12.0, 14.0, 16.5, 18.0, 19.5, 21.0, 22.0, 22.0)

G, T, B, H, F, P = (
    Stage.GERMINATED,
    Stage.TRAINING,
    Stage.BLENDING,
    Stage.HOLDING,
    Stage.FOSSILIZED,
    Stage.PRUNED,
)
E, R, D = Stage.EMBARGOED, Stage.RESETTING, Stage.DORMANT
STAGES_OF_SEED = {0: {1: T, 2: B, 3: B, 4: H, 5: H, 6: F, 7: F, 8: F}, 1: {2: T, 3: T, 4: B}, 2: {7: T, 8: T}}
"""Stage of each seed after each epoch, as ``[seed][epoch]``; the seed with index i is in slot i."""
SEED_PARAMS = (148, 1200, 40)
SEED_BLUEPRINTS = (BlueprintAction.CONV_LIGHT, BlueprintAction.CONV_HEAVY, BlueprintAction.NORM)
SEED_STYLES = (Style.LINEAR_ADD, Style.GATED_GATE, Style.SIGMOID_ADD)

MOVES_BEFORE_EPOCH = {
    1: [(0, D, G, "policy", "germinated"), (0, G, T, "mechanical", "incubation begins")],
    2: [(1, D, G, "policy", "plateau"), (1, G, T, "mechanical", "incubation begins")],
    6: [(0, H, F, "policy", "fossilized")],
    7: [(2, D, G, "policy", "germinated"), (2, G, T, "mechanical", "incubation begins")],
}
MOVES_AFTER_EPOCH = {
    2: [(0, T, B, "mechanical", "incubation is over")],
    4: [(0, B, H, "mechanical", "full alpha reached"), (1, T, B, "mechanical", "incubation is over")],
    5: [(1, B, P, "governor", "non-finite loss"), (1, P, E, "mechanical", "cooling down")],
    7: [(1, E, R, "mechanical", "embargo is over")],
    8: [(1, R, D, "mechanical", "slot is empty again")],
}
ACTIONS = {
    1: LifecycleOp.GERMINATE,
    2: LifecycleOp.GERMINATE,
    6: LifecycleOp.FOSSILIZE,
    7: LifecycleOp.GERMINATE,
    8: LifecycleOp.FOSSILIZE,
}


def run_row(
    name: str = "demo", controller: str = "heuristic", *, episodes: int = 1, iterations: int | None = None
) -> RunRow:
    return RunRow(
        schema_version=SCHEMA_VERSION,
        name=name,
        started="2030-01-01T00:00:00Z",
        task="digits_impaired",
        controller=controller,
        rng_seed=0,
        data_hash="0" * 64,
        config={"episodes": episodes} if iterations is None else {"iterations": iterations},
        git_revision=None,
        versions={"python": "3.11"},
        hardware={"processors": 2},
        host_params=HOST_PARAMS,
        slots=SLOTS,
        ops=list(OP_NAMES),
        heads=list(HEAD_NAMES),
        blueprints=list(BLUEPRINT_NAMES),
        stages=list(STAGE_NAMES),
        head_choices=[list(names) for names in SPACE.choice_names],
        horizon=EPOCHS,
        iterations=iterations,
        envs=1,
    )


def epoch_row(epoch: int, episode: int = 0, env: int = 0) -> EpochRow:
    grown = sum(SEED_PARAMS[seed] for seed, episode in STAGES_OF_SEED.items() if epoch in episode)
    return EpochRow(
        env=env,
        episode=episode,
        epoch=epoch,
        train_loss=None if epoch == 0 else 2.5 / epoch,
        train_score=None if epoch == 0 else SCORES[epoch] + 1,
        val_loss=2.75 / (epoch + 1),
        val_score=SCORES[epoch],
        twin_score=TWIN_SCORES[epoch],
        params=HOST_PARAMS + grown,
        grown_params=grown,
        host_gradient_norm=None if epoch == 0 else 0.5,
        learning_rate=0.05,
        skipped_batches=0,
        ms=15.0,
        phase_ms={"act": 0.5, "train": 10.0, "measure": 4.5},
    )


def seed_row(seed: int, epoch: int, episode: int = 0) -> SeedRow:
    stage = STAGES_OF_SEED[seed][epoch]
    born = min(STAGES_OF_SEED[seed]) - 1
    measured = stage not in (T, G)
    return SeedRow(
        env=0,
        episode=episode,
        epoch=epoch,
        slot=seed,
        seed=seed,
        blueprint=SEED_BLUEPRINTS[seed],
        style=SEED_STYLES[seed],
        stage=stage,
        age=epoch - born,
        alpha={T: 0.0, B: 0.5, H: 1.0, F: 1.0}[stage],
        contribution=(21.94, -3.0, 0.04)[seed] if measured else None,
        contribution_error=(0.8, 1.25, 0.3)[seed] if measured else None,
        shapley=(20.5, -2.5, None)[seed] if measured else None,
        interaction_sum=None,
        freshness=1.0 if measured else 0.0,
        gradient_norm=0.1,
        gradient_health=1.0,
        params=SEED_PARAMS[seed],
    )


def transition_row(
    epoch: int, slot: int, origin: Stage, target: Stage, cause: str, reason: str, episode: int = 0
) -> TransitionRow:
    is_empty = origin in (P, E, R)
    return TransitionRow(
        env=0,
        episode=episode,
        epoch=epoch,
        slot=slot,
        seed=-1 if is_empty else slot,
        blueprint=-1 if is_empty else SEED_BLUEPRINTS[slot],
        from_stage=origin,
        to_stage=target,
        cause=cause,
        reason=reason,
        gate=None,
        passed=[],
        score=SCORES[epoch],
        contribution=None,
        age=0,
    )


def decision_row(epoch: int, episode: int = 0) -> DecisionRow:
    return DecisionRow(
        env=0,
        episode=episode,
        epoch=epoch,
        action=[ACTIONS.get(epoch + 1, LifecycleOp.WAIT), 0, 0, 0, 0, 0, 0, 0],
        read=[True] + [False] * 7,
        forced=False,
        succeeded=epoch != 7,
        refused_by="G5" if epoch == 7 else None,
        failed_checks=[],
    )


def episode_row(episode: int = 0) -> EpisodeRow:
    return EpisodeRow(
        env=0,
        episode=episode,
        epoch=EPOCHS,
        val_score=61.5,
        test_score=60.25,
        twin_val_score=22.0,
        best_val_score=64.1,
        host_params=HOST_PARAMS,
        params=398,
        host_flops_per_sample=2_000,
        flops_per_sample=25_000,
        flops={
            "forward": 1_200_000_000,
            "backward": 2_400_000_000,
            "validation": 150_000_000,
            "counterfactual": 400_000_000,
            "pruned_seeds": 250_000_000,
        },
        op_counts=[3, 3, 0, 0, 2, 0],
        refused=1,
        rollbacks=0,
        ended_by="horizon",
        seconds=12.5,
    )


def policy_decision_row(epoch: int, episode: int = 0, env: int = 0) -> DecisionRow:
    """Return a decision row of a policy without null values: GERMINATE blueprint conv_light in slot r0c1."""
    return DecisionRow(
        env=env,
        episode=episode,
        epoch=epoch,
        action=[LifecycleOp.GERMINATE, 1, BlueprintAction.CONV_LIGHT, Style.SIGMOID_ADD, 2, 1, 0, 0],
        read=[True] * 6 + [False] * 2,
        forced=False,
        succeeded=True,
        refused_by=None,
        failed_checks=[],
        masked=[True, False, True, False, False, False, False, False],
        log_probs=[-0.5, -1.25, -0.125, -1.0, -1.5, -0.75, None, None],
        op_probs=[0.25, 0.625, 0.0, 0.125, 0.0, 0.0],
        value=0.3,
        reward=0.1,
        reward_terms={"lead": 0.15, "rent": -0.05, "rollback": None},
    )


def counterfactual_row(epoch: int, on: tuple[bool, ...] = (True, False, True)) -> CounterfactualRow:
    return CounterfactualRow(env=0, episode=0, epoch=epoch, on=list(on), score=41.0, loss=0.5)


def alert_row(rule: str = "collapse", event: Literal["raised", "cleared"] = "raised") -> AlertRow:
    return AlertRow(
        rule=rule,
        event=event,
        severity="warning",
        scope="slot r0c1",
        value=2.5,
        limit=2.25,
        hint="rolled back to epoch 3",
        env=0,
        episode=0,
        epoch=4,
    )


def resource_row() -> ResourceRow:
    return ResourceRow(rss_mb=120.5, rows_written=7, writer_ms=0.25, disk_free_mb=12_000.5)


def update_row(number: int) -> UpdateRow:
    """Return the row of a PPO update without policy evaluation; two heads have unknown entropy."""
    return UpdateRow(
        iteration=number,
        mean_return=0.5,
        reward_terms={"lead": 0.75, "rent": -0.25, "rollback": 0.0},
        reward_variance=0.02,
        reward_variance_unpaired=0.04,
        val_score=40.0 + number,
        params=800.5,
        broken_episodes=0,
        op_shares=[0.5, 0.25, 0.0, 0.125, 0.125, 0.0],
        policy_loss=-0.01,
        value_loss=0.2,
        entropy=1.5,
        head_entropy=[0.9, 0.8, 0.7, 0.6, 0.5, 0.4, None, None],
        explained_variance=0.4,
        value_nrmse=0.75,
        value_return_correlation=None,
        approx_kl=0.01,
        clip_fraction=0.1,
        ratio_mean=1.0,
        ratio_std=0.1,
        ratio_max=1.5,
        ratio_min=0.5,
        first_ratio_error=1e-7,
        update_epochs=6,
        early_stop_update_epoch=None,
        grad_norm=0.7,
        head_grad_norm=[0.1] * 8,
        forced_share=0.25,
        skipped=None,
        explosion={"env": 1, "step": 2, "head": "op", "ratio": 7.5},
        evaluation_return=None,
        evaluation_score=None,
        seconds=12.5,
        phase_ms={"rollout": 9000.0, "update": 3000.0},
    )


def one_row_of_each_table() -> dict[str, Row]:
    return {
        "run": run_row(),
        "epoch": epoch_row(0),
        "seed": seed_row(0, 4),
        "transition": transition_row(5, 1, B, P, "governor", 'a\nb "c" ±'),
        "decision": policy_decision_row(7),
        "episode": episode_row(),
        "counterfactual": counterfactual_row(4),
        "alert": alert_row(),
        "update": update_row(3),
        "resource": resource_row(),
    }


def episode(episode: int = 0) -> Iterator[Row]:
    """Yield all telemetry rows of one episode in order."""
    yield epoch_row(0, episode)
    for epoch in range(1, EPOCHS + 1):
        yield decision_row(epoch - 1, episode)
        for move in MOVES_BEFORE_EPOCH.get(epoch, []):
            yield transition_row(epoch - 1, *move, episode=episode)
        for move in MOVES_AFTER_EPOCH.get(epoch, []):
            yield transition_row(epoch, *move, episode=episode)
        for seed, stages in STAGES_OF_SEED.items():
            if epoch in stages:
                yield seed_row(seed, epoch, episode)
        yield epoch_row(epoch, episode)
    yield transition_row(EPOCHS, 2, T, P, "mechanical", "horizon", episode=episode)
    yield episode_row(episode)
