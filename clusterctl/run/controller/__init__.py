"""The process that runs one run: a loop over what arrives, and a part for each thing that it sees to."""

from clusterctl.run.controller.beginning import Preflight
from clusterctl.run.controller.loop import Controller
from clusterctl.run.controller.run import Dial, Post

__all__ = ["Controller", "Dial", "Post", "Preflight"]
