"""Environments in which networks grow: tasks, data, training of hosts with seeds, and episodes."""
