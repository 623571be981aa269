"""The one door for what comes from nodes: every field of every message has a type with bounds, declared here.

What does not fit raises `FrameError`, which names the field. For a live session that is its end; a reader of a run's
files leaves the line out and names it.
"""
