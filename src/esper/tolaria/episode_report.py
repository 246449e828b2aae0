"""Report of a finished episode."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EpisodeReport:
    """Results of a finished episode; all scores belong to the committed network."""

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
    """FLOPs of the episode by purpose."""
    op_counts: tuple[int, ...]
    refused: int
    val_scores: tuple[float, ...]
    """Validation scores of the untrained host and after every epoch."""
    rollbacks: int
    cut_short: bool
    """Whether too many rollbacks ended the episode before its horizon."""
