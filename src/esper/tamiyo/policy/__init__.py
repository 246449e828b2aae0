"""From slot table and signals to what the policy network reads, and from its logits to actions."""
