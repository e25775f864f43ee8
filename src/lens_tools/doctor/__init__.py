"""``lens doctor``: what telemetry would do in an environment, and what stands in its way."""
