"""Exporters of recorded runs to other tools; they read files and never run during a training."""
