"""The rounds of all-reduces: groups of nodes meet by a store, and a rank that is missing delays each rank once at most.

Keys of the store:

    STAGE/RANK      the rank has reached the stage; the store answers with `STAGE`: the JSON list of all ranks that have
    at/ROUND/RANK   the rank waits for its group of the round
    gone            ranks that others have missed, each with a comma
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

if TYPE_CHECKING:
    from .device_steps import Device
    from .reporter import Reporter

distributed: Any = torch.distributed  # The classes of torch's C++ code have no types.
_STAGES = ("devices", "rounds", "end")
_POLL_S = 0.05
_GPU_BYTES, _CPU_BYTES = 256 << 20, 4 << 20
_MAX_REPEATS, _REPEAT_S = 10, 1.0
"""The most timed all-reduces of a round, and the seconds after which no further one begins."""


def serve_store(settings: dict[str, Any]) -> int:
    """Serve the store until the ranks have ended. A stage ends once all ranks are there, or no further one comes."""
    size, limits = int(os.environ["WORLD_SIZE"]), {"devices": settings["start_limit_s"]}
    store = _open_store(settings, is_server=True)
    present = list(range(size))
    for stage in _STAGES:
        missing, here = set(present), list[int]()
        limit_s = limits.get(stage, settings["limit_s"])
        deadline = time.monotonic() + limit_s
        while missing and time.monotonic() < deadline:
            come = {rank for rank in missing if store.check([f"{stage}/{rank}"])}
            missing -= come
            here += come
            if come and stage != "devices":
                # Ranks end their steps one after the other. The first stage alone has a fixed end.
                deadline = time.monotonic() + limit_s
            time.sleep(_POLL_S)
        present = sorted(here)
        store.set(stage, json.dumps(present))
    time.sleep(_POLL_S)
    return 0


def _open_store(settings: dict[str, Any], *, is_server: bool = False) -> Any:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    limit = timedelta(seconds=settings["start_limit_s"])
    return distributed.TCPStore(address, port, is_master=is_server, wait_for_workers=False, timeout=limit)


class Network:
    """This rank's part in the rounds.

    Args:
        device: The device whose memory is reduced.
        settings: The settings of the program.
        out: Receives the results.
    """

    def __init__(self, device: Device, settings: dict[str, Any], out: Reporter) -> None:
        self._device, self._out = device, out
        self._limit_s, self._rounds = float(settings["limit_s"]), settings["rounds"]
        self._rank, self._node = int(os.environ["RANK"]), int(os.environ["GROUP_RANK"])
        self._backend = "nccl" if device.is_gpu and distributed.is_nccl_available() else "gloo"
        if self._backend == "nccl":
            # NCCL's watchdog would end this process at the first late peer; the guard has limits of its own.
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        self._store = _open_store(settings)
        self._store.set("node/%d" % self._rank, str(self._node))  # noqa: UP031
        self._ranks: dict[int, list[int]] = {}

    def meet(self, stage: str, limit_s: float) -> None:
        """Wait until all ranks that still live have reached a stage."""
        limit_s += 2 * self._limit_s
        self._out.begin(f"wait for {stage}", limit_s)
        self._store.set(f"{stage}/{self._rank}", "")
        self._store.wait([stage], timedelta(seconds=limit_s))
        here = json.loads(self._store.get(stage))
        nodes = {rank: int(self._store.get(f"node/{rank}")) for rank in here} if stage == "rounds" else {}
        for rank, node in nodes.items():
            self._ranks.setdefault(node, []).append(rank)

    def finish(self) -> None:
        """Tell the store that this rank has ended."""
        self._store.set(f"end/{self._rank}", "")

    def make_rounds(self) -> None:
        """Make the all-reduces of this node in all rounds, and report them."""
        if self._node not in self._ranks or self._rank not in self._ranks[self._node]:
            self._report_late(None)
            return
        for number, groups in enumerate(self._rounds):
            group = next((nodes for nodes in groups if self._node in nodes), None)
            if group is None:
                continue
            gone = self._read_gone()
            if self._rank in gone:
                self._report_late(number)
                return
            nodes = [node for node in group if set(self._ranks.get(node, ())) - gone]
            ranks = sorted(rank for node in nodes for rank in self._ranks[node] if rank not in gone)
            if len(ranks) < 2 or (len(nodes) < 2 <= len(group)):
                continue
            self._out.begin("round", 3 * self._limit_s, round=number)
            try:
                if not self._wait_for(number, ranks):
                    continue
                timed = self._time_round(number, ranks)
            except RuntimeError as error:
                # A peer has failed or is late. This rank goes on with its other peers.
                text = str(error).partition("\n")[0][:300]
                self._out.report("round", round=number, group=nodes, ranks=len(ranks), seconds=None, reason=text)
                continue
            if self._rank == ranks[0]:
                self._out.report("round", round=number, group=nodes, ranks=len(ranks), **timed)

    def _report_late(self, number: int | None) -> None:
        """Report that this rank takes no part any more. A busy node is slow, but not broken."""
        reason = "the other ranks had waited for this rank in vain"
        self._out.report("failed", during="round", round=number, is_late=True, reason=reason)

    def _read_gone(self) -> set[int]:
        self._store.append("gone", "")
        return {int(rank) for rank in self._store.get("gone").decode().split(",") if rank}

    def _wait_for(self, number: int, ranks: list[int]) -> bool:
        """Wait until the ranks are there; mark those that do not come as gone, and return False."""
        keys = {rank: f"at/{number}/{rank}" for rank in ranks}
        self._store.set(keys[self._rank], "")
        try:
            self._store.wait(list(keys.values()), timedelta(seconds=self._limit_s))
        except RuntimeError:
            for rank, key in keys.items():
                if not self._store.check([key]):
                    self._store.append("gone", f"{rank},")
            return False
        return True

    def _time_round(self, number: int, ranks: list[int]) -> dict[str, Any]:
        """Repeat an all-reduce in a group of ranks; return the fields of the line `round`."""
        size = _GPU_BYTES if self._device.is_gpu else _CPU_BYTES
        # A group for each group of nodes: a rank that failed in one does not concern the other groups.
        store = distributed.PrefixStore(f"group/{number}/{ranks[0]}", self._store)
        group = self._make_group(store, ranks.index(self._rank), len(ranks))
        place = self._device.device if self._backend == "nccl" else torch.device("cpu")
        data, small = (torch.ones(words, dtype=torch.float32, device=place) for words in (size // 4, 1))
        first = self._reduce(group, data)
        if int(data[-1]) != len(ranks) or int(data[0]) != len(ranks):
            raise RuntimeError(f"the sum of {len(ranks)} ones is {float(data[0])} and {float(data[-1])}")
        small.fill_(first)
        self._reduce(group, small)
        # All ranks of the group compute the same count from the sum of their times.
        count = max(2, min(_MAX_REPEATS, int(_REPEAT_S / max(float(small[0]) / len(ranks), 1e-6))))
        times = []
        for _ in range(count):
            self._reduce(group, small)
            data.fill_(1.0)
            self._device.synchronize()
            times.append(self._reduce(group, data))
        times.sort()
        return {
            "bytes": size,
            "seconds": times[0],
            "median_s": times[len(times) // 2],
            "repeats": count,
            "backend": self._backend,
            "algorithm": os.environ.get("NCCL_ALGO") if self._backend == "nccl" else None,
            "protocol": os.environ.get("NCCL_PROTO") if self._backend == "nccl" else None,
        }

    def _make_group(self, store: Any, index: int, size: int) -> Any:
        limit = timedelta(seconds=self._limit_s)
        if self._backend == "gloo":
            return distributed.ProcessGroupGloo(store, index, size, limit)
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = limit  # noqa: SLF001  (torch has no other name for it)
        return distributed.ProcessGroupNCCL(store, index, size, options)

    def _reduce(self, group: Any, data: torch.Tensor) -> float:
        """Make an all-reduce, and return its seconds.

        Raises:
            RuntimeError: A peer has failed, or has not answered in time.
        """
        began = time.perf_counter()
        work = group.allreduce([data], distributed.AllreduceOptions())
        if self._backend == "gloo":
            work.wait()
        else:
            while not work.is_completed():
                if time.perf_counter() - began > self._limit_s:
                    group.abort()
                    raise RuntimeError(f"the all-reduce has not ended within {self._limit_s:g} s")
                time.sleep(0)
        return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(serve_store(json.loads(sys.argv[1])))
