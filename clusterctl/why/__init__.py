"""Judges from evidence what went wrong with a run, and which ranks or nodes are to blame. Pure: no I/O, no clock."""
