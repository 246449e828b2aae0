"""Command-line interface: parses flags, calls the other packages, and prints results."""
