"""What went wrong with a run, and who: from evidence to a verdict. Pure: no I/O, no clock."""
