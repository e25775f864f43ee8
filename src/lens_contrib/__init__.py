"""Adapters of lens_core: one module per library whose messages carry a context."""
