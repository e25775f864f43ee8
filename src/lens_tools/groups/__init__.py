"""``lens groups``: switch the span groups of a run that is running."""
