"""The reading of a GPU of any vendor, names for the errors of libraries and drivers, and the processes on a GPU.

    unsupported     the card or the driver does not have this value
    denied          this user may not read the value
    lost            the GPU has disappeared
    reset-required  the GPU needs a reset
    power           the GPU lacks power
    corrupted       the configuration memory of the GPU is corrupted
    timeout         the call timed out
    unknown         the driver does not know the cause
    failed          the call failed for a reason that says nothing about the GPU
    resetting       the GPU is being reset

Facts contain the vendor's error number beside the error name, for people.
"""

from __future__ import annotations

import errno
import os
import time

from clusterctl.agent.facts.process_scan import read_run_id
from clusterctl.agent.linux import kernel_files
from clusterctl.agent.linux.proc import read_meminfo, sanitize_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any


UNSUPPORTED, DENIED, FAILED = "unsupported", "denied", "failed"
LOST, RESET, POWER, CORRUPTED = "lost", "reset-required", "power", "corrupted"
TIMEOUT, UNKNOWN, RESETTING = "timeout", "unknown", "resetting"

TRANSIENT_ERRORS = frozenset({POWER, TIMEOUT, UNKNOWN, RESETTING})
"""The errors that a healthy GPU may report occasionally. Such an error counts only if further readings repeat the
error.
"""
GPU_ERRORS = frozenset({LOST, RESET, POWER, TIMEOUT, UNKNOWN, RESETTING})
"""The errors that concern the GPU and not the call."""

NVML_ERROR_NAMES = {
    **dict.fromkeys((3, 13, 25), UNSUPPORTED),
    4: DENIED,
    8: POWER,
    10: TIMEOUT,
    **dict.fromkeys((11, 999), UNKNOWN),
    14: CORRUPTED,
    **dict.fromkeys((15, 28), LOST),
    16: RESET,
}
"""The error names for the return codes of NVIDIA's `nvml.h`. Code 11 is an interrupt problem; 13 and 25 mean that the
library is newer than the driver.
"""

FILE_ERROR_NAMES = {
    **dict.fromkeys((errno.ENOENT, errno.EOPNOTSUPP, errno.EINVAL), UNSUPPORTED),
    errno.EACCES: DENIED,
    **dict.fromkeys((errno.EPERM, errno.EBUSY), RESETTING),
    **dict.fromkeys((errno.ENODEV, errno.ENXIO, errno.EIO), LOST),
    **dict.fromkeys((errno.ETIME, errno.ETIMEDOUT), TIMEOUT),
}
"""The error names for the error numbers of reading a file of `amdgpu`. During the reset of a GPU, the driver returns
EPERM, or EBUSY in newer kernels, to every user (`amdgpu_pm_dev_state_check` in `amdgpu_pm.c`).
"""

_MAX_RETRIES = 2
"""The maximum number of further readings of a value whose error may be transient."""
_PAUSE_S = 0.12
"""The pause in seconds before each further reading of all GPUs."""


class BaseGpuReading:
    """The values of one GPU at one moment.

    Args:
        vendor: `nvidia` or `amd`.
        index: The vendor's index of the GPU.
        error_names: The name for each error number of the vendor.

    Attributes:
        values: The values that were read, by name.
        codes: The vendor's error number for each value that could not be read.
        odd: The error number of each value whose error a later reading has not repeated.
    """

    def __init__(self, vendor: str, index: int, error_names: dict[int, str]) -> None:
        self._vendor, self._index, self._error_names = vendor, index, error_names
        self.values: dict[str, Any] = {}
        self.codes: dict[str, int] = {}
        self.odd: dict[str, int] = {}

    def set_value(self, name: str, value: Any, error: int | None) -> None:
        """Store a value, or the error number if the value could not be read."""
        if error is None:
            self.values[name] = value
            self.codes.pop(name, None)
        else:
            self.codes[name] = error

    def get_error_name(self, code: int) -> str:
        """Return the name for an error number of the vendor."""
        return self._error_names.get(code, FAILED)

    def find_transient_errors(self) -> dict[str, int]:
        """Return the present errors that are in `TRANSIENT_ERRORS`."""
        return {name: code for name, code in self.codes.items() if self.get_error_name(code) in TRANSIENT_ERRORS}

    def is_doubtful(self) -> bool:
        """Return whether a value may be transient and must be read again."""
        return bool(self.find_transient_errors())

    def retry(self) -> None:
        """Read the values with transient errors again."""
        wrong = self.find_transient_errors()
        self.reread_values(list(wrong))
        self.odd.update({name: code for name, code in wrong.items() if name not in self.codes})

    def reread_values(self, names: list[str]) -> None:
        """Read the values in `names` again."""
        raise NotImplementedError

    def to_facts(self) -> dict[str, Any]:
        """Return the reading as facts, in the format that `clusterctl.agent.facts` documents."""
        words = {name: self.get_error_name(code) for name, code in self.codes.items()}
        facts = {"vendor": self._vendor, "index": self._index, "v": self.values, "err": words, "codes": self.codes}
        return {**facts, "odd": self.odd} if self.odd else facts


def repeat_doubtful_readings(readings: Sequence[BaseGpuReading]) -> None:
    """Read doubtful values of all GPUs again, at most `_MAX_RETRIES` times."""
    for _ in range(_MAX_RETRIES):
        doubtful = [reading for reading in readings if reading.is_doubtful()]
        if not doubtful:
            return
        time.sleep(_PAUSE_S)
        for reading in doubtful:
            reading.retry()


def read_shared_memory(root: str) -> dict[str, int]:
    """Return the memory of a GPU that has none of its own and uses the main memory (bytes), as version 0."""
    sizes = read_meminfo(root)
    total = sizes.get("MemTotal", 0)
    return {"used": total - sizes.get("MemAvailable", total), "total": total, "version": 0}


_MONITORING_PROGRAMS = (
    *("nv-hostengine", "dcgm-exporter", "nvidia-persiste", "nvidia-cuda-mps", "gpud", "nvidia-smi", "nvitop", "nvtop"),
    *("amd-smi", "rocm-smi", "gpuagent", "rdcd"),
)
"""The names of monitoring programs, which use GPUs permanently without computing. The kernel cuts each name to 15
characters.
"""

UNKNOWN_PROCESS: dict[str, Any] = {"comm": None, "user": None, "run": None, "visible": False, "agent": False}
"""The description of a process that is not visible in this container."""


def describe_gpu_process(root: str, pid: int) -> dict[str, Any]:
    """Return name, user and run of a process that the driver has listed.

    A process of another container is invisible.
    """
    comm = kernel_files.read_text(root, f"/proc/{pid}/comm")
    try:
        owner: int | None = os.stat(kernel_files.join_root(root, f"/proc/{pid}")).st_uid
    except OSError:
        owner = None
    run = read_run_id(root, pid) if comm else None
    comm = None if comm is None else sanitize_name(comm)
    return {"comm": comm, "user": owner, "run": run, "visible": comm is not None, "agent": comm in _MONITORING_PROGRAMS}
