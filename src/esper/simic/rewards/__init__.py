"""What a decision is paid: few bounded terms, in a ledger that sums to the reward."""
