"""Training loops and the oracle environments that prove them."""
