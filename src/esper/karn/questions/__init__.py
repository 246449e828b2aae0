"""Figures of a run: each module computes the numbers of a figure from telemetry rows and draws them."""
