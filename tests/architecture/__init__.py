"""The house, held by tests: each check is a function over a source tree, tried on a planted fault.

A check gives what it found as ``{name: where and what}``. What is known and not mended yet stands
in a list beside it, each with a reason; a name that is on the list and no longer found fails too,
so the lists only shrink.
"""
