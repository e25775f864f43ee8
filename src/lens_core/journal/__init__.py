"""The span journal: what a process knew about its spans, readable after it was killed.

A span that is open when its process is killed is lost by every exporter, and those spans are the
ones that say who waited for whom. The journal is a memory-mapped file per process. Its pages belong
to the kernel, so they outlive the process however it ends (not the machine: see
:mod:`lens_core.journal.location`).

The file is a table of blocks. A span takes a block when it starts and writes there what it is;
what is added while it is open is appended; its end is stamped into the block. The block is given
back when the span has been exported (``all``) or has ended (``open``). So an ended span that is not
yet exported needs no second copy, and each fact is encoded once.

=======================  ======================================================================
``format``               the bytes: header, blocks, records
``encoding``             spans as payloads of records
``decoding``             payloads back to spans
``spill``                files for ended spans that do not fit the table
``process_identity``     which process wrote a journal
``location``             where journals are
``pointers``             says in a run's directory where they are
``notes``                how a process ended, and how much of a spill file has been delivered
``write.settings``       what a journal keeps, and where
``write.table``          the memory-mapped file of this process: takes blocks, commits records
``write.table_file``     makes that file, whole
``write.slot``           where one span stands in it
``write.bus_error``      survives that somebody truncates the file
``write.writer``         the journal of this process: start, add, end, acknowledge, fork
``write.ended_spans``    ended spans that are not exported yet: in the table, or spilled
``write.heartbeat``      the thread that writes signs of life, and stacks when nothing moves
``write.stacks``         the stacks of all threads, on a fatal signal and on request
``write.processor``      plugs it into the SDK
``read.reader``          journals of other processes, alive or dead
``read.process_files``   all files of one of them
``read.liveness``        whether the process that wrote a journal is still there
``read.death``           how it ended
``recover.recovery``     journals of dead processes as ordinary telemetry
``recover.truncation``   their spans, the open ones marked as cut off
``recover.sinks``        where those go: the contract, files, and which directory that may be
=======================  ======================================================================
"""
