"""Set-up of the OpenTelemetry SDK for a process of a training campaign.

Nothing here imports the SDK until :func:`lens_core.setup_telemetry` is called with telemetry
enabled: a disabled process pays neither the import nor anything else.
"""
