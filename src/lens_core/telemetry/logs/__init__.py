"""Python's log records as OpenTelemetry log records."""
