"""Metrics: the provider and its reader, those of the training step and of telemetry itself."""
