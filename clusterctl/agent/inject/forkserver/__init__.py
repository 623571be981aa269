"""The forkserver: it runs in the workers' own Python, imports installed libraries once, and forks ranks.

Its package is `_clusterctl_forkserver` there. It has the command line of a rank, and stops in our `sitecustomize`,
before Python looks at the script. A rank that it forks goes on from there: Python itself runs the script.

It stands between supervisor and workers only while a worker is started: the waiter of each is a process of the agent,
whose parent is the supervisor.
"""

import sys

STARTED = frozenset(sys.modules)
"""What Python has loaded by itself, before the folder of the script is on the path: it comes from no folder of the
user's."""
