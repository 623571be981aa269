"""Network interfaces that join what runs on one machine, and no machines."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

VIRTUAL_INTERFACE_PREFIXES = ("docker", "br-", "veth", "virbr", "cni", "flannel", "cali", "tunl", "kube", "vnet")
"""How the names of interfaces of containers and virtual machines begin: workers of several nodes do not meet there."""


def select_interfaces(variable: str, value: str, names: Sequence[str]) -> list[str]:
    """Return which interfaces of a node a variable selects, in its order, or in that of the node.

    NCCL takes beginnings of names, `=` and whole names, or `^` and what it shall not take; the others take whole names.
    """
    wanted = [word.partition(":")[0].strip() for word in value.lstrip("^=").split(",")]
    is_whole = not variable.startswith("NCCL") or value.lstrip("^").startswith("=")
    found = {want: [name for name in names if (name == want if is_whole else name.startswith(want))] for want in wanted}
    if variable.startswith("NCCL") and value.startswith("^"):
        unwanted = {name for some in found.values() for name in some}
        return [
            name for name in names if name not in unwanted and not name.startswith(("lo", *VIRTUAL_INTERFACE_PREFIXES))
        ]
    return list(dict.fromkeys(name for some in found.values() for name in some))
