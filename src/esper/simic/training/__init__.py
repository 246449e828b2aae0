"""Training loop of a policy: environments, rollouts, exchange between processes."""
