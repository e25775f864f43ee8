"""A small, real training run over every transport, and the check that each hop resolves.

``training`` is the pipeline-parallel training itself (torch and gloo, no Ray), ``actors`` puts it
into Ray actors, ``driver`` calls them, and ``session`` holds the run against what was sent;
``command`` is ``lens demo``.
"""
