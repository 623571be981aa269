"""A lab node that believes it has GPUs: NVIDIA's library, the kernel log and installed packages are played."""

from __future__ import annotations

from typing import Final

from tests import fake_nvml
from tests.lab.spec import NodeSpec

SCENE: Final = "/run/fake/scene.json"
DMESG: Final = "/run/fake/dmesg"
DENIED: Final = "dmesg: read kernel buffer failed: Operation not permitted"
SITE: Final = "/run/site"
PACKAGES: Final = {
    f"{SITE}/torch-2.6.0.dist-info/METADATA": "",
    f"{SITE}/torch/version.py": "cuda = '12.4'\n",
    f"{SITE}/nvidia_nccl_cu12-2.21.5.dist-info/METADATA": "",
}
"""What a GPU machine has installed, as far as a look reads of it; the machine that runs the tests may have less."""


def gpu_node(user: str = "root") -> NodeSpec:
    """Return the spec of such a node; its scenario is what `fake_nvml.Scenario(node.path(SCENE))` writes.

    Only root may read its kernel log, as on most machines.
    """
    library = str(fake_nvml.library())
    return NodeSpec(
        user=user,
        env={"LD_LIBRARY_PATH": library, "FAKE_NVML": SCENE, "PYTHONPATH": SITE},
        expose=(library,),
        files={SCENE: "{}", DMESG: "", **PACKAGES},
        programs={"dmesg": f"#!/bin/sh\n[ \"$(id -u)\" = 0 ] || {{ echo '{DENIED}' >&2; exit 1; }}\ncat {DMESG}\n"},
    )
