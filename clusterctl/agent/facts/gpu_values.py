"""What all vendors' GPUs share: words for the errors of libraries and drivers, and the processes on a GPU.

    unsupported     the card or the driver does not have this value: nothing to judge
    denied          this user is not permitted
    lost            the GPU has disappeared
    reset-required  the GPU needs a reset
    power           the GPU lacks power
    corrupted       the configuration memory of the GPU is corrupted
    timeout         the call timed out
    unknown         the driver does not know the cause
    failed          the call failed for a reason that says nothing about the GPU
    resetting       the GPU is being reset

Facts keep the vendor's code beside the word, for people.
"""

from __future__ import annotations

import errno
import os

from clusterctl.agent.facts.processes import get_run
from clusterctl.agent.linux import sysfs
from clusterctl.agent.linux.proc import sanitize_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


UNSUPPORTED, DENIED, FAILED = "unsupported", "denied", "failed"
LOST, RESET, POWER, CORRUPTED = "lost", "reset-required", "power", "corrupted"
TIMEOUT, UNKNOWN, RESETTING = "timeout", "unknown", "resetting"

ODD = frozenset({POWER, TIMEOUT, UNKNOWN, RESETTING})
"""Errors that a healthy GPU gives now and then; they count only if they repeat."""
TROUBLE = frozenset({LOST, RESET, POWER, TIMEOUT, UNKNOWN, RESETTING})
"""Errors that concern the GPU rather than the call."""

_NVML = {
    3: UNSUPPORTED,
    4: DENIED,
    8: POWER,
    10: TIMEOUT,
    11: UNKNOWN,
    13: UNSUPPORTED,
    14: CORRUPTED,
    15: LOST,
    16: RESET,
    25: UNSUPPORTED,
    28: LOST,
    999: UNKNOWN,
}
"""Return codes of NVIDIA's `nvml.h`: 11 is an interrupt problem, 13 and 25 come from a library newer than the driver.
"""


_FILE = {
    errno.ENOENT: UNSUPPORTED,
    errno.EOPNOTSUPP: UNSUPPORTED,
    errno.EINVAL: UNSUPPORTED,
    errno.EACCES: DENIED,
    errno.EPERM: RESETTING,
    errno.EBUSY: RESETTING,
    errno.ENODEV: LOST,
    errno.ENXIO: LOST,
    errno.EIO: LOST,
    errno.ETIME: TIMEOUT,
    errno.ETIMEDOUT: TIMEOUT,
}
"""Errors of reading a file of `amdgpu`. While it resets a GPU, the driver returns EPERM, or EBUSY in newer kernels, to
every user (`amdgpu_pm_dev_state_check` of its `amdgpu_pm.c`).
"""


def file_error_word(number: int) -> str:
    """Return the word for the error of reading a driver's file."""
    return _FILE.get(number, FAILED)


def nvml_error_word(code: int) -> str:
    """Return the word for a return code of NVML."""
    return _NVML.get(code, FAILED)


_AGENTS = (
    "nv-hostengine",
    "dcgm-exporter",
    "nvidia-persiste",
    "nvidia-cuda-mps",
    "gpud",
    "nvidia-smi",
    "nvitop",
    "nvtop",
    "amd-smi",
    "rocm-smi",
    "gpuagent",
    "rdcd",
)
"""Monitoring programs that hold GPUs all the time and compute nothing; names as the kernel cuts them."""

UNKNOWN_PROCESS: dict[str, Any] = {"comm": None, "user": None, "run": None, "visible": False, "agent": False}
"""A process that is not visible from here."""


def describe_process(root: str, pid: int) -> dict[str, Any]:
    """Describe a process that the driver lists; processes of other containers may be invisible here."""
    comm = sysfs.read_text(root, f"/proc/{pid}/comm")
    try:
        owner: int | None = os.stat(sysfs.join_root(root, f"/proc/{pid}")).st_uid
    except OSError:
        owner = None
    run = get_run(root, pid) if comm else None
    comm = None if comm is None else sanitize_name(comm)
    return {"comm": comm, "user": owner, "run": run, "visible": comm is not None, "agent": comm in _AGENTS}
