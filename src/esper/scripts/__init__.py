"""Commands: parsing only, the work is done elsewhere."""
