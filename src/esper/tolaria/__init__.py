"""The engine: tasks, data, epochs, counterfactuals, environments."""
