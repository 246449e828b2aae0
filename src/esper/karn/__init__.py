"""Everything that reads telemetry: queries, figures, reports and views."""
