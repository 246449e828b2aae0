"""Reward families: a reward is the sum of a few named terms."""
