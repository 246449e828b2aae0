"""Readers of telemetry: SQL, questions, figures, report, terminal view and page."""
