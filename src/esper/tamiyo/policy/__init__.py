"""Inputs and outputs of the policy network: observations, masks, distributions, checkpoints."""
