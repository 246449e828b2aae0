"""Rewards: few bounded terms, recorded by name, that sum to the reward."""
