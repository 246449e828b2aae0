"""Report of a finished episode."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EpisodeReport:
    """Scores, sizes and compute of a finished episode; final scores are those of the committed network."""

    val_score: float
    val_loss: float
    test_score: float
    test_loss: float
    best_val_score: float
    host_params: int
    params: int
    host_flops_per_sample: int
    flops_per_sample: int
    """FLOPs of a forward pass per sample, of the host alone and of the committed network."""
    flops: dict[str, int]
    """FLOPs of the episode by purpose of the compute, such as backward passes or validation."""
    op_counts: tuple[int, ...]
    refused: int
    val_scores: tuple[float, ...]
    """Validation scores by epoch; the first is the score of the untrained host."""
    rollbacks: int
    cut_short: bool
    """Whether too many rollbacks ended the episode before its horizon."""
