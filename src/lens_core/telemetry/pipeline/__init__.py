"""From an ended span to a sink: queue, retries, spill."""
