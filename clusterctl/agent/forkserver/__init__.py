"""The forkserver: it runs in the workers' own Python, imports installed libraries once, and forks ranks.

Its package is `_clusterctl_forkserver` there. It has the command line of a rank and stops in our `sitecustomize`,
before Python reads the script. A forked rank continues from there: Python itself runs the script.
"""

import sys

STARTED = frozenset(sys.modules)
"""Modules that Python loads before the folder of the script is on the path, so they cannot be the user's."""


class CannotForkError(Exception):
    """A rank cannot be forked, and starts as a new process; the text is the reason."""
