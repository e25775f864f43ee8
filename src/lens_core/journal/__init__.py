"""The span journal: what a process knew about its spans, readable after it was killed.

A span that is open when its process is killed is lost by every exporter, and those spans are the
ones that say who waited for whom. The journal is a memory-mapped file per process. Its pages belong
to the kernel, so they outlive the process however it ends (not the machine: see
:mod:`lens_core.journal.location`).

The file is a table of blocks. A span takes a block when it starts and writes there what it is;
what is added while it is open is appended; its end is stamped into the block. The block is given
back when the span has been exported (``all``) or has ended (``open``). So an ended span that is not
yet exported needs no second copy, and each fact is encoded once.

=============  ================================================================================
``format``     the bytes: header, blocks, records
``encoding``   spans as payloads of records
``images``     payloads as data, and back to SDK spans
``table``      the memory-mapped file of this process: takes blocks, commits records
``bus_error``  survives that somebody truncates the file
``writer``     the journal of this process: start, add, end, acknowledge, spill, fork
``spill``      files for ended spans that do not fit the table
``heartbeat``     the thread that writes signs of life, and stacks when nothing moves
``stacks``     the stacks of all threads, on a fatal signal and on request
``processor``  plugs it into the SDK
``process``    which process wrote a journal
``location``   where journals are
``pointers``   says in a run's directory where they are
``reader``     journals of other processes, alive or dead
``opening``    opens them, unless somebody put something else there
``liveness``   whether the process that wrote a journal is still there
``exit_note``  how it ended, from who saw that
``recovery``   journals of dead processes as ordinary telemetry
``output``     where that may be written
=============  ================================================================================
"""
