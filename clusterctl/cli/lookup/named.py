"""Machines that are named on the command line, without a cluster file."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import click

from clusterctl.errors import ConfigError

if TYPE_CHECKING:
    from clusterctl.config.spec import ClusterSpec


def spec_of(names: str) -> ClusterSpec:
    """Return the spec of a cluster of these hosts, which are reached as ssh knows them.

    The names are checked as those of a cluster file are: they reach ssh, and through its configuration a shell.

    Raises:
        click.BadParameter: One is no name of a host.
    """
    from clusterctl.config.loader import ClusterFileText, DiskFiles, parse_cluster_file

    text = json.dumps({"version": 1, "name": "hosts", "hosts": names})
    source = ClusterFileText(path="-w", absolute=os.path.abspath("cluster.yaml"), text=text)
    try:
        return parse_cluster_file([source], environ=os.environ, files=DiskFiles()).spec
    except ConfigError as error:
        first = error.problems[0]
        raise click.BadParameter(first.text.removeprefix("hosts: "), param_hint="-w") from error
