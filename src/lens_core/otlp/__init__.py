"""OTLP as bytes and text: SDK spans, metrics and logs to JSON lines and protobuf, and back.

Encoders and readers only; what sends them is :mod:`lens_core.telemetry.export`.
"""
