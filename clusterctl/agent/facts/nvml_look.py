"""One look at one NVIDIA GPU: values, the error of each call that gave none, and what has to be asked again."""

from __future__ import annotations

import ctypes

from clusterctl.agent.facts import answers, holding, nvml_values

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

    from clusterctl.agent.protocol.types.found import gpus as shapes

HW_SLOWDOWN = 0x8 | 0x40 | 0x80
"""Clock event bits of a slowdown by hardware: any, thermal, power brake."""

_P2P_READ, _P2P_NVLINK = 0, 2  # the bindings' own constant for reading is a tuple, by a stray comma
_MOST_LINKS = 36
_BINDINGS_FAILED = 2
"""The code kept for a call that the bindings themselves could not make."""
_INVALID_ARGUMENT = 2


class Look:
    """A look at one GPU.

    Args:
        nvml: The bindings' module.
        index: NVML's index of the GPU.
        handle: Its handle and `None`, or `None` and the code that asking for it ended with.
        root: Prefix of /proc.

    Attributes:
        values: What was read.
        codes: NVML's code for each value that could not be read.
        odd: Codes that a second look did not give again.
    """

    def __init__(self, nvml: Any, index: int, handle: tuple[Any, int | None], root: str = "/") -> None:
        self._nvml, self._index, self._root = nvml, index, root
        self._handle, error = handle
        self.values: dict[str, Any] = {}
        self.codes: dict[str, int] = {} if error is None else {"handle": error}
        self.odd: dict[str, int] = {}
        self._calls: dict[str, Callable[[], Any]] = {}

    def at_all(self) -> Look:
        """Read everything that is judged before a run."""
        if self._handle is not None:
            self._calls = nvml_values.all_values(self._nvml, self._handle)
            self._read(list(self._calls))
            self._fields(nvml_values.FIELDS)
            self._list_throttle()
            self._retired()
            self._links()
            self._processes()
        return self

    def at_a_sample(self) -> Look:
        """Read the few values that a running job is watched by."""
        if self._handle is not None:
            self._calls = nvml_values.sampled(self._nvml, self._handle)
            self._read(list(self._calls))
            self._fields(nvml_values.SAMPLED_FIELDS)
        return self

    def doubtful(self) -> bool:
        """Tell whether something was seen that may be chance: ask `again` before it is believed."""
        slowed = any(bits & HW_SLOWDOWN for bits in self.values.get("throttle") or [])
        hidden = any(not entry["visible"] for entry in self.values.get("procs") or [])
        return slowed or hidden or bool(self._odd_calls())

    def again(self) -> None:
        """Ask once more for what is doubtful."""
        if self._handle is None:
            self._handle, error = attempt(self._nvml, self._nvml.nvmlDeviceGetHandleByIndex, self._index)
            if error is None:
                self.odd["handle"] = self.codes.pop("handle")
                self.at_all()
            return
        wrong = {name: self.codes[name] for name in self._odd_calls()}
        self._read([name for name in wrong if name in self._calls])
        self._fields({number: name for number, name in nvml_values.FIELDS.items() if name in wrong})
        self.odd.update({name: code for name, code in wrong.items() if name not in self.codes})
        self._list_throttle()
        self._throttle_again()
        self._processes_again()

    def told(self) -> shapes.Device:
        """Return the look as facts (`clusterctl.agent.facts` has the shape)."""
        words = {name: answers.of_nvml(code) for name, code in self.codes.items()}
        odd: shapes.Device = {"odd": self.odd} if self.odd else {}
        return {
            "vendor": "nvidia",
            "index": self._index,
            "v": self.values,
            "err": words,
            "codes": self.codes,
            **odd,
        }

    def p2p(self, other: Look) -> list[int | None] | None:
        """Return NVML's status of the pair over NVLink and for reading; `None` without one of the two handles."""
        if self._handle is None or other._handle is None:
            return None
        status = self._nvml.nvmlDeviceGetP2PStatus
        return [
            attempt(self._nvml, status, self._handle, other._handle, which)[0] for which in (_P2P_NVLINK, _P2P_READ)
        ]

    def links(self) -> list[int | None]:
        """Return the state of each NVLink, up to the last that the card has; `None` for one that it has not."""
        states: list[int | None] = []
        for link in range(_MOST_LINKS):
            state, error = attempt(self._nvml, self._nvml.nvmlDeviceGetNvLinkState, self._handle, link)
            # A link that is not supported may be a hole: others can come after it.
            if error is not None and answers.of_nvml(error) != answers.UNSUPPORTED:
                break
            states.append(state)
        while states and states[-1] is None:
            states.pop()
        return states

    def holders(self) -> list[dict[str, Any]]:
        """Return who holds the GPU, as far as the driver tells."""
        self._processes()
        return self.values.get("procs") or []

    def _odd_calls(self) -> list[str]:
        return [name for name, code in self.codes.items() if answers.of_nvml(code) in answers.ODD]

    def _read(self, names: list[str]) -> None:
        for name in names:
            self._keep(name, *attempt(self._nvml, self._calls[name]))

    def _keep(self, name: str, value: Any, error: int | None) -> None:
        if error is None:
            self.values[name] = value
            self.codes.pop(name, None)
        else:
            self.codes[name] = error

    def _fields(self, wanted: dict[int, str]) -> None:
        if not wanted:
            return
        told, error = attempt(self._nvml, self._nvml.nvmlDeviceGetFieldValues, self._handle, list(wanted))
        if error is not None:
            self.codes.update(dict.fromkeys(wanted.values(), error))
            return
        for answer in told:
            number, code = answer.fieldId, answer.nvmlReturn
            # A driver calls a field that is newer than it an invalid argument.
            newer = code == _INVALID_ARGUMENT
            error = None if code == 0 else self._nvml.NVML_ERROR_NOT_SUPPORTED if newer else code
            self._keep(wanted[number], nvml_values.field(number, answer), error)

    def _retired(self) -> None:
        """Join the two counts of retired pages, where the card has any."""
        counts = [self.values.pop(name, None) for name in ("retired_sbe", "retired_dbe")]
        codes = [self.codes.pop(name, None) for name in ("retired_sbe", "retired_dbe")]
        error = next((code for code in codes if code is not None), None)
        self._keep("retired", counts, error)

    def _links(self) -> None:
        states = self.links()
        self._keep("nvlinks", states, None if states else self._nvml.NVML_ERROR_NOT_SUPPORTED)

    def _list_throttle(self) -> None:
        bits = self.values.get("throttle")
        if isinstance(bits, int):
            self.values["throttle"] = [bits]

    def _throttle_again(self) -> None:
        samples = self.values.get("throttle")
        if samples and samples[0] & HW_SLOWDOWN:
            again, error = attempt(self._nvml, self._calls["throttle"])
            samples.append(0 if error is not None else again)

    def _processes(self) -> None:
        listed = self._listed()
        if "procs" not in self.codes:
            self.values["procs"] = [{**entry, **holding.identity(self._root, pid)} for pid, entry in listed.items()]

    def _processes_again(self) -> None:
        """Leave out whom we cannot see and is not listed again: that process was just ending."""
        procs = self.values.get("procs") or []
        if not all(entry["visible"] for entry in procs):
            listed = self._listed()
            self.values["procs"] = [entry for entry in procs if entry["visible"] or entry["pid"] in listed]

    def _listed(self) -> dict[int, dict[str, Any]]:
        n = self._nvml
        found: dict[int, dict[str, Any]] = {}
        kinds = {
            "compute": n.nvmlDeviceGetComputeRunningProcesses_v3,
            "mps": n.nvmlDeviceGetMPSComputeRunningProcesses_v3,
            "graphics": n.nvmlDeviceGetGraphicsRunningProcesses_v3,
        }
        for kind, call in kinds.items():
            processes, error = attempt(n, call, self._handle)
            if error is not None and kind == "compute":
                self.codes["procs"] = error
            for process in processes or []:
                found.setdefault(process.pid, {"pid": process.pid, "used": process.usedGpuMemory, "kind": kind})
        return found


def attempt(nvml: Any, call: Callable[..., Any], *arguments: Any) -> tuple[Any, int | None]:
    """Return what a call gives and `None`, or `None` and the code that it ended with."""
    try:
        return call(*arguments), None
    except nvml.NVMLError as error:
        return None, error.value
    except (ctypes.ArgumentError, AttributeError, TypeError):
        return None, _BINDINGS_FAILED
