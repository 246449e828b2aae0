"""The engine's work written without the engine: what its speed is compared with."""
