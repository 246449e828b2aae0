"""Reward families: each defines the reward of a step as the sum of a few named terms."""
