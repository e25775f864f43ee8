"""What lens costs, as ratios within one interleaved run. ``python -m benchmarks [NAME ...]``."""
