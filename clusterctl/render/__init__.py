"""Renders values as lines of text for users. Only `console` writes to streams; the other modules are pure."""
