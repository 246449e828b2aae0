"""Charts of a run: each module computes the numbers of a chart from telemetry rows and draws them."""
