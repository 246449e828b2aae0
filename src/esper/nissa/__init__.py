"""Writers of telemetry: append-only files of typed rows, alert rules and exporters."""
