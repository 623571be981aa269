"""Names of network interfaces: virtual ones, and the selection by NCCL, Gloo and TensorPipe."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

VIRTUAL_INTERFACE_PREFIXES = ("docker", "br-", "veth", "virbr", "cni", "flannel", "cali", "tunl", "kube", "vnet")
"""Prefixes of virtual interfaces (containers, virtual machines), which do not connect nodes."""


def select_interfaces(variable: str, value: str, names: Sequence[str]) -> list[str]:
    """Return the interfaces of a node that a variable selects, in the order of its value, or of the node for `^`.

    NCCL accepts prefixes, `=` with exact names, or `^` with names to exclude; the others accept exact names.
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
