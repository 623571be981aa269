"""What all vendors' GPUs share: a reading, words for the errors of libraries and drivers, the processes on a GPU.

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
import time

from clusterctl.agent.facts.processes import read_run_id
from clusterctl.agent.linux import kernel_files
from clusterctl.agent.linux.proc import sanitize_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any


UNSUPPORTED, DENIED, FAILED = "unsupported", "denied", "failed"
LOST, RESET, POWER, CORRUPTED = "lost", "reset-required", "power", "corrupted"
TIMEOUT, UNKNOWN, RESETTING = "timeout", "unknown", "resetting"

ODD = frozenset({POWER, TIMEOUT, UNKNOWN, RESETTING})
"""Errors that a healthy GPU gives now and then; they count only if they repeat."""
TROUBLE = frozenset({LOST, RESET, POWER, TIMEOUT, UNKNOWN, RESETTING})
"""Errors that concern the GPU rather than the call."""

NVML_WORDS = {
    **dict.fromkeys((3, 13, 25), UNSUPPORTED),
    4: DENIED,
    8: POWER,
    10: TIMEOUT,
    **dict.fromkeys((11, 999), UNKNOWN),
    14: CORRUPTED,
    **dict.fromkeys((15, 28), LOST),
    16: RESET,
}
"""Return codes of NVIDIA's `nvml.h`: 11 is an interrupt problem, 13 and 25 come from a library newer than the driver.
"""

FILE_WORDS = {
    **dict.fromkeys((errno.ENOENT, errno.EOPNOTSUPP, errno.EINVAL), UNSUPPORTED),
    errno.EACCES: DENIED,
    **dict.fromkeys((errno.EPERM, errno.EBUSY), RESETTING),
    **dict.fromkeys((errno.ENODEV, errno.ENXIO, errno.EIO), LOST),
    **dict.fromkeys((errno.ETIME, errno.ETIMEDOUT), TIMEOUT),
}
"""Errors of reading a file of `amdgpu`. While it resets a GPU, the driver returns EPERM, or EBUSY in newer kernels, to
every user (`amdgpu_pm_dev_state_check` of its `amdgpu_pm.c`).
"""

_MORE_READINGS = 2
"""How often a value that may be a chance result is read again."""
_PAUSE_S = 0.12
"""Seconds before each further reading: one pause for all GPUs together."""


class GpuReading:
    """A reading of one GPU.

    Args:
        vendor: `nvidia` or `amd`.
        index: The vendor's index of the GPU.
        words: The word for each error number of the vendor.

    Attributes:
        values: The values that were read.
        codes: The vendor's error number for each value that could not be read.
        odd: Error numbers that a second reading did not repeat.
    """

    def __init__(self, vendor: str, index: int, words: dict[int, str]) -> None:
        self._vendor, self._index, self._words = vendor, index, words
        self.values: dict[str, Any] = {}
        self.codes: dict[str, int] = {}
        self.odd: dict[str, int] = {}

    def set_value(self, name: str, value: Any, error: int | None) -> None:
        """Store a value, or the error number of reading it."""
        if error is None:
            self.values[name] = value
            self.codes.pop(name, None)
        else:
            self.codes[name] = error

    def get_error_word(self, code: int) -> str:
        """Return the word for an error number."""
        return self._words.get(code, FAILED)

    def find_transient_errors(self) -> dict[str, int]:
        """Return the errors that a healthy GPU gives now and then."""
        return {name: code for name, code in self.codes.items() if self.get_error_word(code) in ODD}

    def is_doubtful(self) -> bool:
        """Return whether a result may be chance, so that it must be read again."""
        return bool(self.find_transient_errors())

    def retry(self) -> None:
        """Read the doubtful values once more."""
        wrong = self.find_transient_errors()
        self.read_again(list(wrong))
        self.odd.update({name: code for name, code in wrong.items() if name not in self.codes})

    def read_again(self, names: list[str]) -> None:
        """Read these values once more."""
        raise NotImplementedError

    def to_facts(self) -> dict[str, Any]:
        """Return the reading as facts (`clusterctl.agent.facts` has the format)."""
        words = {name: self.get_error_word(code) for name, code in self.codes.items()}
        facts = {"vendor": self._vendor, "index": self._index, "v": self.values, "err": words, "codes": self.codes}
        return {**facts, "odd": self.odd} if self.odd else facts


def repeat_doubtful_readings(readings: Sequence[GpuReading]) -> None:
    """Read values that may be chance results again, of all GPUs at once."""
    for _ in range(_MORE_READINGS):
        doubtful = [reading for reading in readings if reading.is_doubtful()]
        if not doubtful:
            return
        time.sleep(_PAUSE_S)
        for reading in doubtful:
            reading.retry()


_AGENTS = (
    *("nv-hostengine", "dcgm-exporter", "nvidia-persiste", "nvidia-cuda-mps", "gpud", "nvidia-smi", "nvitop", "nvtop"),
    *("amd-smi", "rocm-smi", "gpuagent", "rdcd"),
)
"""Monitoring programs that hold GPUs all the time and compute nothing; names as the kernel cuts them."""

UNKNOWN_PROCESS: dict[str, Any] = {"comm": None, "user": None, "run": None, "visible": False, "agent": False}
"""A process that is not visible from here."""


def describe_process(root: str, pid: int) -> dict[str, Any]:
    """Describe a process that the driver lists; processes of other containers may be invisible here."""
    comm = kernel_files.read_text(root, f"/proc/{pid}/comm")
    try:
        owner: int | None = os.stat(kernel_files.join_root(root, f"/proc/{pid}")).st_uid
    except OSError:
        owner = None
    run = read_run_id(root, pid) if comm else None
    comm = None if comm is None else sanitize_name(comm)
    return {"comm": comm, "user": owner, "run": run, "visible": comm is not None, "agent": comm in _AGENTS}
