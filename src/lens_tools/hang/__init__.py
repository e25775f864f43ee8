"""``lens hang``: who waits for whom in a run that hangs, or hung."""
