"""``lens run``: a command under eyes that see how each of its processes ends.

==============  =================================================================================
``command``     the subcommand: starts, attends, recovers, ends as the command ended
``child``       starts the command, and ends this process in the way that the command did
``signals``     passes on what was sent to ``lens run`` alone, and nothing twice
``exits``       how a process ended that is somebody else's child
``watch``       finds the journals of the command's processes, and notes how these end
==============  =================================================================================
"""
