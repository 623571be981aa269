"""The zygote: it runs in the workers' own Python as the package `_clusterctl_fork`, imports once, and forks ranks.

It stands between supervisor and workers only while a worker is started: the waiter of each is a process of the agent,
whose parent is the supervisor, and the worker is the waiter's child, as where every worker begins anew.
"""

import sys

STARTED = frozenset(sys.modules)
"""What Python has loaded by itself, before the script or a `-c` is looked at: it comes from no folder of the user's."""
