"""The forkserver: a process of the workers' own Python that imports installed libraries once and forks ranks.

In a forkserver, the name of this package is `_clusterctl_forkserver`. A forkserver has the command line of a rank.
Clusterctl's `sitecustomize` runs the forkserver before Python reads the script. In a forked rank, `sitecustomize`
returns, and Python runs the script.
"""

import sys

STARTED = frozenset(sys.modules)
"""Modules that Python loads before it adds the folder of the script to `sys.path`: the user cannot replace them."""


class CannotForkError(Exception):
    """Ranks cannot be forked, so they start as new processes; the message is the reason."""
