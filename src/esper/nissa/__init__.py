"""Telemetry: typed rows, written to append-only files."""
