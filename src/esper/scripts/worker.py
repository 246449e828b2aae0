"""One of several processes that share a training run; started by torchrun through ``esper train``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist

from esper.config import TrainingConfig, checked, read_settings
from esper.scripts.flags import exit_on_user_error
from esper.scripts.train_command import RoundPrinter
from esper.teaching import teach


def main() -> None:
    """Arguments: configuration file, run directory, ``start`` or ``resume``."""
    file, directory, how = sys.argv[1:]
    dist.init_process_group("gloo")
    try:
        config = checked(TrainingConfig, read_settings(Path(file)))
        teach(config, Path(directory), resume=how == "resume", on_round=RoundPrinter(config.rounds))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    exit_on_user_error(main)
