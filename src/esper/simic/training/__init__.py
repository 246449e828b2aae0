"""Training loop of a policy: environments, rollouts, exchange of rollouts between processes."""
