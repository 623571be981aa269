"""`python -m clusterctl.agent.facts`: a request on stdin, facts on stdout."""

import sys

from clusterctl.agent.facts import main

if __name__ == "__main__":
    sys.exit(main(sys.stdin, sys.stdout))
