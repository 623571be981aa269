"""XIDs as the driver reports them while we watch: errors of GPUs, told as they happen, kernel log or no kernel log."""

from __future__ import annotations

import ctypes

from clusterctl.agent.facts import bindings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_MOST = 64
"""Events taken in one pass: a GPU that dies may report without an end."""


class Xids:
    """A set of NVML events for all GPUs of an open session; XIDs only."""

    def __init__(self, handles: list[Any]) -> None:
        self._nvml = bindings.load()
        self._indices = {_address(handle): index for index, handle in enumerate(handles) if handle is not None}
        self._set: Any = None
        try:
            events = self._nvml.nvmlEventSetCreate()
            for handle in filter(None, handles):
                self._register(handle, events)
            self._set = events
        except (self._nvml.NVMLError, AttributeError):
            # Old drivers and some virtual GPUs have no events; samples and kernel log still tell.
            return

    def _register(self, handle: Any, events: Any) -> None:
        try:
            self._nvml.nvmlDeviceRegisterEvents(handle, self._nvml.nvmlEventTypeXidCriticalError, events)
        except self._nvml.NVMLError:
            # One GPU that cannot be watched must not blind us for the others.
            return

    def take(self) -> list[dict[str, Any]]:
        """Return what was reported since the last call: `[{"gpu": index or None, "xid": code}]`."""
        errors: list[dict[str, Any]] = []
        while self._set is not None and len(errors) < _MOST:
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._set, 0)
            except self._nvml.NVMLError:
                # A timeout: there is no more.
                break
            if event.eventType == self._nvml.nvmlEventTypeXidCriticalError:
                errors.append({"gpu": self._indices.get(_address(event.device)), "xid": int(event.eventData)})
        return errors


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value
