"""The journal of this process: the mapped file, what is put there, and the thread that keeps it."""
