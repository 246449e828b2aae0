"""Import and use every name that the specification lists as importable."""

import torch

from esper import MorphogeneticModel, harvest
from esper.kasmina.hosts import CNNHost, TransformerHost
from esper.kasmina.slot import SeedSlot
from esper.leyline import factored_actions
from esper.leyline.factored_actions import (
    BLEND_IDS,
    BLUEPRINT_IDS,
    BLUEPRINT_NULL_INDEX,
    CNN_BLUEPRINTS,
    DEFAULT_BLUEPRINT_EMBED_DIM,
    DEFAULT_FEATURE_DIM,
    DEFAULT_GAMMA,
    DEFAULT_LSTM_HIDDEN_DIM,
    HEADS_OF_OP,
    NUM_BLUEPRINTS,
    NUM_OPS,
    NUM_STYLES,
    NUM_TEMPO,
    OP_ADVANCE,
    OP_FOSSILIZE,
    OP_GERMINATE,
    OP_NAMES,
    OP_PRUNE,
    OP_SET_ALPHA_TARGET,
    OP_WAIT,
    TRANSFORMER_BLUEPRINTS,
    BlueprintAction,
    FactoredAction,
    LifecycleOp,
)
from esper.leyline.reports import SeedStateReport
from esper.leyline.rules import SlotConfig
from esper.leyline.signals import TrainingSignals
from esper.leyline.slot_table import SlotTable, legal_slots_by_op
from esper.leyline.stages import NUM_STAGES
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.simic.diagnostics import RatioExplosionDiagnostic
from esper.tamiyo.networks.factored_lstm import BlueprintEmbedding, FactoredRecurrentActorCritic
from esper.tamiyo.policy.action_masks import compute_action_masks, compute_batch_masks
from esper.tamiyo.policy.distributions import MaskedCategorical
from esper.tamiyo.policy.features import batch_obs_to_features, get_feature_size
from esper.tolaria.batches import SharedBatchIterator
from esper.tolaria.vector import SerialVector
from tests.leyline.building import space_of
from tests.tamiyo.policy.observations import signals_of
from tests.tolaria.building import tiny_task

SPACE = space_of(3)


def test_action_constants_and_factored_actions_match_the_specification() -> None:
    sizes = (NUM_OPS, NUM_BLUEPRINTS, NUM_STYLES, NUM_TEMPO, NUM_STAGES, BLUEPRINT_NULL_INDEX)
    assert sizes == (6, 13, 4, 3, 10, 13)
    assert (DEFAULT_BLUEPRINT_EMBED_DIM, DEFAULT_FEATURE_DIM, DEFAULT_LSTM_HIDDEN_DIM) == (4, 256, 256)
    assert DEFAULT_GAMMA == 0.995
    ops = (OP_WAIT, OP_GERMINATE, OP_SET_ALPHA_TARGET, OP_PRUNE, OP_FOSSILIZE, OP_ADVANCE)
    assert ops == tuple(LifecycleOp)
    assert [LifecycleOp(op).name for op in ops] == list(OP_NAMES)
    action = FactoredAction.from_indices([OP_GERMINATE, 2, BlueprintAction.LORA, 3, 0, 1, 2, 4])
    assert action.is_germinate
    assert (
        (action.blueprint_id, action.blend_id) == (BLUEPRINT_IDS[8], BLEND_IDS[3]) == ("lora", "gated_gate")
    )
    assert BlueprintAction.NOOP not in CNN_BLUEPRINTS | TRANSFORMER_BLUEPRINTS
    assert HEADS_OF_OP.shape == (6, 8)
    assert not hasattr(factored_actions, "Op")


def test_default_slot_ids_legal_germination_and_empty_seed_report_match_the_specification() -> None:
    slots = SlotConfig.default()
    assert slots.slot_ids == ("r0c0", "r0c1", "r0c2")
    table = SlotTable.empty(1, 3)
    assert legal_slots_by_op(table, SPACE.rules)[0, OP_GERMINATE].all()
    report = SeedStateReport()
    unknown = (report.counterfactual_contribution, report.seed_gradient_norm_ratio, report.seed_param_count)
    assert unknown == (None, None, None)


def test_observations_and_policy_outputs_have_the_specified_shapes() -> None:
    slots, table = SlotConfig.default(), SlotTable.empty(2, 3)
    signals = signals_of(2)
    assert isinstance(signals, TrainingSignals)
    obs, blueprint_indices = batch_obs_to_features(signals, table, slots, torch.device("cpu"))
    assert obs.shape == (2, get_feature_size(slots)) == (2, 121)
    assert BlueprintEmbedding()(blueprint_indices).shape == (2, 3, 4)
    policy = FactoredRecurrentActorCritic(state_dim=121, num_slots=3)
    assert policy.num_slots == 3
    hidden = policy.get_initial_hidden(2)
    masks = compute_batch_masks(table, SPACE)
    assert torch.equal(compute_action_masks(table, 1, SPACE).op, masks.op[1:])
    result = policy(obs.unsqueeze(1), blueprint_indices.unsqueeze(1), op_mask=masks.op.unsqueeze(1))
    assert result["op_logits"].shape == (2, 1, 6)
    assert result["value"].shape == (2, 1)
    decision = policy.get_action(obs, blueprint_indices, hidden, masks, deterministic=True)
    assert policy.get_value(obs, blueprint_indices, hidden).shape == decision.value.shape == (2,)
    sequences = (x.unsqueeze(1) for x in (obs, blueprint_indices, decision.actions, decision.masks))
    evaluated = policy.evaluate_actions(*sequences, hidden, torch.zeros(2, 1, dtype=torch.bool))
    assert torch.allclose(evaluated.log_probs[:, 0], decision.log_probs)
    assert MaskedCategorical(torch.zeros(4), torch.tensor([True, True, False, False])).entropy() == 1.0


def test_shared_batch_iterator_yields_lists_of_one_minibatch_per_environment() -> None:
    vector = SerialVector(tiny_task(batches_per_epoch=2), rng_seed=0, env_indices=(0, 1))
    vector.reset()
    for env in vector.envs:
        env.host.begin_epoch(0)
    batches = list(SharedBatchIterator([env.host for env in vector.envs]))
    assert [[found.inputs.shape for found in batch] for batch in batches] == [[(32, 1, 8, 8)] * 2] * 2


def test_imported_rollout_buffer_ratio_diagnostic_hosts_and_harvest_can_be_used() -> None:
    buffer = TamiyoRolloutBuffer(num_envs=2, num_steps=5, state_dim=121, num_slots=3, hidden_dim=8)
    assert buffer.get_batched_sequences()[0].shape == (2, 5, 121)
    assert (
        RatioExplosionDiagnostic.of(*(torch.zeros(1, 1, *shape) for shape in ((), (8,), (8,), (8,)))) is None
    )
    images = MorphogeneticModel(CNNHost((4, 8), kernel=3, input_shape=(1, 8, 8), classes=10))
    text = MorphogeneticModel(TransformerHost(vocabulary=9, context=4, width=8, layers=2))
    for model, inputs, outputs in (
        (images, torch.zeros(1, 1, 8, 8), 10),
        (text, torch.zeros(1, 4).long(), 9),
    ):
        assert model.slot_config.num_slots == 2
        assert sum(isinstance(module, SeedSlot) for module in model.modules()) == 2
        assert harvest(model)(inputs).shape[-1] == outputs
