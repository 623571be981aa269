"""What NVIDIA's management library says about every GPU; each call's error is kept beside the others' values.

`amdgpu` has the same for AMD: a `collect` and a `Session` under a name of its own are all that a vendor needs.
"""

from __future__ import annotations

import ctypes
import time

from clusterctl.agent.facts import bindings, nvml_values
from clusterctl.agent.facts.children import AbsentError
from clusterctl.agent.facts.nvml_look import Look, attempt
from clusterctl.agent.linux import paths

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from clusterctl.agent.protocol.types.found import gpus as shapes

LIBRARY = "libnvidia-ml.so.1"
LIBRARY_NOT_FOUND = 12
MORE_LOOKS = 2
"""How often what may be chance is asked again."""
_PAUSE = 0.12
"""Seconds before each further look: one pause for all GPUs together."""


def collect(root: str, wanted: bool) -> shapes.Nvml:
    """Return the group `nvml`.

    Raises:
        AbsentError: No GPU is asked for, or there is neither library nor bindings.
    """
    if not wanted:
        raise AbsentError("no GPU is declared")
    if not _library_is_there():
        return {"init_error": LIBRARY_NOT_FOUND, "devices": []}
    session = Session()
    if session.init_error is not None:
        return {"init_error": session.init_error, "devices": []}
    looks = session.looks(root)
    devices = [look.told() for look in looks]
    return {
        **session.system(),
        "devices": devices,
        "p2p": session.p2p(looks),
        "uvm": paths.opened(root, "/dev/nvidia-uvm"),
    }


def open_session() -> Session | str:
    """Return NVML, open; or, where there is none to open, why."""
    if not _library_is_there():
        return "there is no NVIDIA driver library"
    try:
        return Session()
    except AbsentError as error:
        return str(error)


def _library_is_there() -> bool:
    """Tell whether the driver's library loads: to know that, the costly bindings need not be loaded."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


class Session:
    """NVML kept open: handles are taken once, values at every call.

    Attributes:
        init_error: The code that opening ended with, or `None`.
        init_ms: How long opening took, handles included: without persistence mode the driver starts each GPU then.
    """

    vendor = "nvidia"

    def __init__(self) -> None:
        try:
            self._nvml = bindings.load()
        except bindings.NoBindingsError as error:
            raise AbsentError(str(error)) from error
        self.init_error: int | None = None
        self.init_ms = 0.0
        began = time.monotonic()
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            self.init_error = error.value
            return
        self.count = attempt(self._nvml, self._nvml.nvmlDeviceGetCount)
        self.handles = [
            attempt(self._nvml, self._nvml.nvmlDeviceGetHandleByIndex, i) for i in range(self.count[0] or 0)
        ]
        self.init_ms = round((time.monotonic() - began) * 1000, 1)

    @property
    def indices(self) -> list[int]:
        """Return the GPUs that there are."""
        return list(range(len(self.handles)))

    def system(self) -> shapes.NvmlSystem:
        """Return versions, count and what opening took."""
        n = self._nvml
        cuda, cuda_error = attempt(n, n.nvmlSystemGetCudaDriverVersion_v2)
        return {
            "init_error": None,
            "init_ms": self.init_ms,
            "driver": nvml_values.text(attempt(n, n.nvmlSystemGetDriverVersion)[0]),
            "nvml": nvml_values.text(attempt(n, n.nvmlSystemGetNVMLVersion)[0]),
            "cuda": cuda,
            "cuda_error": cuda_error,
            "count": self.count[0],
            "count_error": self.count[1],
        }

    def looks(self, root: str = "/") -> list[Look]:
        """Look at every GPU; ask again, all of them at once, for what may be chance."""
        looks = [Look(self._nvml, index, handle, root).at_all() for index, handle in enumerate(self.handles)]
        for _ in range(MORE_LOOKS):
            doubtful = [look for look in looks if look.doubtful()]
            if not doubtful:
                break
            time.sleep(_PAUSE)
            for look in doubtful:
                look.again()
        return looks

    def sample(self) -> list[shapes.Device]:
        """Return the few values that a running job is watched by."""
        return [Look(self._nvml, i, handle).at_a_sample().told() for i, handle in enumerate(self.handles)]

    def links(self, index: int) -> int:
        """Return how many NVLinks of a GPU are up."""
        handle = self.handles[index]
        return 0 if handle[0] is None else sum(state == 1 for state in Look(self._nvml, index, handle).links())

    def holders(self, indices: list[int]) -> list[dict[str, Any]]:
        """Return memory and processes of some GPUs; those that do not answer are left out: they hold nothing usable."""
        holding = []
        for index in indices:
            if index >= len(self.handles) or self.handles[index][0] is None:
                continue
            memory = attempt(self._nvml, nvml_values.memory, self._nvml, self.handles[index][0])[0]
            if memory is not None:
                procs = Look(self._nvml, index, self.handles[index]).holders()
                holding.append({"gpu": index, **memory, "procs": procs})
        return holding

    @staticmethod
    def p2p(looks: list[Look]) -> list[list[int | None]]:
        """Return `[i, j, over NVLink, read]` for every pair: NVML's status each, `None` where it could not be asked."""
        pairs: list[list[int | None]] = []
        for i, one in enumerate(looks):
            for j, other in enumerate(looks[i + 1 :], i + 1):
                status = one.p2p(other)
                if status is not None:
                    pairs.append([i, j, *status])
        return pairs
