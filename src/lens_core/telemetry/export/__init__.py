"""Where telemetry goes: OTLP over HTTP and gRPC, files, the console."""
