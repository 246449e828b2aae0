"""Command-line interface: parsing of flags and printing of results."""
