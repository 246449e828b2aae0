"""Readers of telemetry: SQL queries, charts, report, terminal view and web page of a run."""
