"""A run that begins with fewer nodes than its file names."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from clusterctl.config.spec import Role

if TYPE_CHECKING:
    from collections.abc import Collection

    from clusterctl.config.spec import ClusterSpec


def without(spec: ClusterSpec, missing: Collection[str]) -> ClusterSpec | None:
    """Return a run's spec in which the workers that are missing wait as spares.

    They may take the place of another one later, as spares do. `None` where nobody allowed to begin with so few.
    """
    left = [host for host in spec.workers if host.name not in missing]
    if spec.min_nodes is None or len(left) < spec.min_nodes:
        return None
    hosts = [dataclasses.replace(h, role=Role.SPARE) if h.name in missing else h for h in spec.hosts]
    return dataclasses.replace(spec, hosts=tuple(hosts))
