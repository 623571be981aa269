"""Validation of what nodes send: each field of each message has a type with bounds, and the package declares them all.

A value that does not fit raises `FrameError`, which names the field. In a live session the error ends the session; a
reader of the run's files skips the line and names it.
"""
