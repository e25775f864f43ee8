"""What is used of the OpenTelemetry SDK beyond its public interface; ``compat`` tests it."""
