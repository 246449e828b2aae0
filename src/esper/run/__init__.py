"""Runs on disk: configuration, construction, execution, telemetry and checkpoints of runs and trainings."""
