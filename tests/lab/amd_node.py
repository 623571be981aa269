"""A lab node that believes it has AMD GPUs: the files of their driver lie in memory, and are bound into its /sys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tests import fake_amdgpu
from tests.unit.health.machines import amd

if TYPE_CHECKING:
    from pathlib import Path

    from tests.lab.node import Node

_FILES: Final = "/run/amd"
_BIND: Final = f"""
set -e
mkdir /run/class /run/pci
cp -a /sys/class/. /run/class/ 2>/dev/null || true
ln -s {_FILES}/sys/class/kfd /run/class/kfd
ln -s {_FILES}/sys/devices/*/*/0000:* /run/pci/
mount --bind /run/class /sys/class
mount --bind /run/pci /sys/bus/pci/devices
"""


def give_gpus(node: Node, count: int, number: int = 0) -> dict[str, Any]:
    """Give a node so many MI300X; return the group of facts that it tells.

    Its /dev is the machine's, where nothing is made: the device nodes stay away.

    Args:
        node: A node that is up.
        count: How many.
        number: Tells the GPUs of several nodes apart.
    """
    group = amd.group([amd.mi300x(i, number, gpus=count) for i in range(count)])
    for entry in group["dev"]:
        entry["access"] = "absent"
    fake_amdgpu.write(node.path(_FILES), group)
    node.run(["sh", "-c", _BIND], check=True)
    return group


def files(node: Node, gpu: dict[str, Any]) -> Path:
    """Return where the files of a GPU lie, to be changed."""
    (place,) = node.path(f"{_FILES}/sys/devices").glob(f"*/*/{gpu['v']['pci']}")
    return place
