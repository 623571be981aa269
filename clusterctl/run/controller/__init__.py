"""The process that controls one run: a loop that handles queued items, and a class for each task."""
