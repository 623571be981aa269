"""What the kernel's amdgpu driver says about every GPU, in files that anybody may read; each error beside the values.

The vendor's library is not asked: it changes its name and layout with every release, takes seconds to start, and reads
the same files.
"""

from __future__ import annotations

import errno
import time

from clusterctl.agent.facts import amdgpu_metrics, answers, holding, procs
from clusterctl.agent.facts.amdgpu_values import Files
from clusterctl.agent.facts.children import AbsentError
from clusterctl.agent.linux import kfd, paths

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

    from clusterctl.agent.facts.amdgpu_metrics import Metrics
    from clusterctl.agent.protocol.types.found import gpus as shapes

MORE_LOOKS = 2
"""How often what may be chance is asked again."""
_PAUSE = 0.12
"""Seconds before each further look: one pause for all GPUs together."""
_KFD = "/dev/kfd"


def collect(root: str, wanted: bool) -> shapes.Amdgpu:
    """Return the group `amdgpu`.

    Raises:
        AbsentError: No GPU is asked for.
    """
    if not wanted:
        raise AbsentError("no GPU is declared")
    session = Session(root)
    looks = session.looks()
    nodes = [_KFD, *(f"/dev/dri/renderD{gpu['render']}" for gpu in session.gpus)]
    return {
        "driver": paths.text(root, "/sys/module/amdgpu/version"),
        "count": len(looks),
        "hidden": session.hidden,
        "dev": [{"path": path, "access": paths.access(root, path)} for path in nodes],
        "numa_balancing": paths.number(root, "/proc/sys/kernel/numa_balancing"),
        "devices": [look.told() for look in looks],
    }


class Session:
    """The GPUs of a machine, found once; values at every call. Has what `nvml.Session` has for those who sample.

    Args:
        root: Prefix of /sys, /proc and /dev.
    """

    vendor = "amd"
    init_error: int | None = None

    def __init__(self, root: str) -> None:
        self._root = root
        self.gpus, self.hidden = kfd.gpus(root)
        self._contained = procs.own_namespace(root)
        self._metrics: dict[int, Metrics | None] = {}
        self._links: dict[int, int] = {}

    @property
    def indices(self) -> list[int]:
        """Return the GPUs that there are."""
        return [gpu["index"] for gpu in self.gpus]

    def looks(self) -> list[Look]:
        """Look at every GPU; ask again, all of them at once, for what may be chance."""
        by_node = {gpu["node"]: gpu["index"] for gpu in self.gpus}
        looks = [Look(self._root, gpu).at_all(self.holders_of(gpu)) for gpu in self.gpus]
        for look, gpu in zip(looks, self.gpus):
            look.values["xgmi"] = kfd.links(self._root, gpu, by_node)
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
        devices = []
        for gpu in self.gpus:
            look = Look(self._root, gpu, self._metrics.get(gpu["index"])).at_a_sample()
            self._metrics[gpu["index"]] = look.metrics
            self._links[gpu["index"]] = sum(look.values.get("xgmi_links") or [])
            devices.append(look.told())
        return devices

    def links(self, index: int) -> int:
        """Return how many XGMI links of a GPU were up in the last sample."""
        if index not in self._links:
            self.sample()
        return self._links.get(index, 0)

    def holders(self, indices: list[int]) -> list[dict[str, Any]]:
        """Return memory and processes of some GPUs; those that do not answer are left out: they hold nothing usable."""
        holding = []
        for gpu in self.gpus:
            if gpu["index"] in indices:
                memory = Look(self._root, gpu).memory()
                if memory is not None:
                    holding.append({"gpu": gpu["index"], **memory, "procs": self.holders_of(gpu)})
        return holding

    def holders_of(self, gpu: dict[str, Any]) -> list[dict[str, Any]]:
        """Return who has memory of a GPU."""
        return [
            {"pid": pid, "used": used, "kind": "compute", **self._identity(pid)}
            for pid, used in kfd.holders(self._root, gpu["gpu_id"]).items()
        ]

    def _identity(self, pid: int) -> dict[str, Any]:
        # The kernel numbers processes as the machine does: in a container that is the number of somebody else.
        return holding.UNSEEN if self._contained else holding.identity(self._root, pid)


class Look:
    """A look at one GPU.

    Args:
        root: Prefix of /sys.
        gpu: What `kfd.gpus` says of it.
        before: The firmware's table as the look before this one read it.

    Attributes:
        values: What was read.
        codes: The error's number for each file that could not be read.
        odd: Numbers that a second look did not give again.
        metrics: The firmware's table, or `None`.
    """

    def __init__(self, root: str, gpu: dict[str, Any], before: Metrics | None = None) -> None:
        self._gpu, self._files = gpu, Files(root, gpu["pci"])
        self.values: dict[str, Any] = {name: gpu[name] for name in ("uuid", "pci") if gpu[name]}
        self.codes: dict[str, int] = {}
        self.odd: dict[str, int] = {}
        self.metrics = before
        self._counted = False
        self._calls: dict[str, Callable[[], Any]] = {}

    def at_all(self, holders: list[dict[str, Any]]) -> Look:
        """Read everything that is judged before a run."""
        plate = {"minor": self._gpu["render"], "gfx": self._gpu["gfx"], "hive": self._gpu["hive"]}
        self.values.update(plate, partition=self._gpu["partition"], procs=holders)
        self._take(self._files.lasting() if self._files.asleep() else self._files.all_values())
        # Virtual functions and some cards have no name of their own.
        if "name" not in self.values:
            self.codes.pop("name", None)
            self.values["name"] = f"AMD {self._gpu['gfx']} ({self._gpu['device']})"
        return self

    def at_a_sample(self) -> Look:
        """Read the few values that a running job is watched by."""
        self._take({} if self._files.asleep() else self._files.sampled())
        return self

    def memory(self) -> dict[str, int] | None:
        """Return used and total bytes, or `None` where the GPU does not answer."""
        self._read({"memory": self._files.sampled()["memory"]})
        return self.values.get("memory")

    def doubtful(self) -> bool:
        """Tell whether to ask `again`: something may be chance, or what holds the clocks down is counted."""
        return bool(self._odd_calls()) or (self._counted and "slowdown" not in self.values)

    def again(self) -> None:
        """Ask once more for what is doubtful."""
        wrong = {name: self.codes[name] for name in self._odd_calls()}
        self._read({name: self._calls[name] for name in wrong if name in self._calls})
        self.odd.update({name: code for name, code in wrong.items() if name not in self.codes})
        self._firmware()

    def told(self) -> shapes.Device:
        """Return the look as facts (`clusterctl.agent.facts` has the shape)."""
        words = {name: answers.of_file(code) for name, code in self.codes.items()}
        odd: shapes.Device = {"odd": self.odd} if self.odd else {}
        index = self._gpu["index"]
        return {"vendor": "amd", "index": index, "v": self.values, "err": words, "codes": self.codes, **odd}

    def _take(self, calls: dict[str, Callable[[], Any]]) -> None:
        self._calls = calls
        if self._files.gone():
            # Every further question to a device that is not there may take seconds.
            self.codes["config"] = errno.ENODEV
            return
        self._read(calls)
        if calls:
            self._firmware()

    def _read(self, calls: dict[str, Callable[[], Any]]) -> None:
        for name, call in calls.items():
            try:
                self.values[name] = call()
                self.codes.pop(name, None)
            except OSError as error:
                self.codes[name] = error.errno or errno.EIO
            except ValueError:
                # Not what the file is documented to hold.
                self.codes[name] = errno.EBADMSG
        if "ras" in self.values and "ras" in calls:
            blocks = self.values["ras"].values()
            self.values.update(ecc_unc=sum(b[0] for b in blocks), ecc_cor=sum(b[1] for b in blocks))

    def _firmware(self) -> None:
        before = self.metrics
        try:
            self.metrics = amdgpu_metrics.Metrics(self._files.metrics())
        except OSError:
            return
        self._counted = self.metrics.counters is not None
        slowdown = amdgpu_metrics.between(before or self.metrics, self.metrics)
        if slowdown is not None and (before is not None or not self._counted):
            self.values["slowdown"] = slowdown
        if self.metrics.links is not None:
            self.values["xgmi_links"] = self.metrics.links

    def _odd_calls(self) -> list[str]:
        return [name for name, code in self.codes.items() if answers.of_file(code) in answers.ODD]
