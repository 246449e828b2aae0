"""Environments: tasks, data, training of hosts with seeds, episodes."""
