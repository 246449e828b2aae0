"""Hands the rows of a run on to other tools. Works on rows that were read back, never beside a training."""
