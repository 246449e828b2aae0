"""What an episode leaves behind."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EpisodeReport:
    """What a finished episode came to; all scores are of the committed network."""

    val_score: float
    val_loss: float
    test_score: float
    test_loss: float
    best_val_score: float
    host_params: int
    params: int
    host_flops_per_sample: int
    flops_per_sample: int
    """Forward pass of the bare host, and of the committed network."""
    flops: dict[str, int]
    op_counts: tuple[int, ...]
    refused: int
    val_scores: tuple[float, ...]
    """Validation score after every epoch, the untrained host's first."""
    rollbacks: int
    cut_short: bool
    """Too many rollbacks ended the episode before its horizon."""
