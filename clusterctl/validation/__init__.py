"""Validation of the data that nodes send. Each field of each message has a type with bounds.

An invalid value raises `FrameError`, which names the field. In an open session this error ends the session. A reader of
the run's files skips an invalid line and reports it.
"""
