"""Collects the evidence of the ranks of this node at one moment, before the end of a stalled run.

For each rank, a thread collects the evidence within a deadline, so a rank that does not answer does not affect other
ranks. The evidence of each rank is written to files.
"""

from __future__ import annotations

import json
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from clusterctl.agent.inject import shim_files
from clusterctl.agent.inject.shim_files import list_foreign_ranks, read_status
from clusterctl.agent.linux import proc
from clusterctl.agent.linux.proc import list_process_tree, read_all_processes
from clusterctl.agent.protocol.stall_folders import format_rank_files
from clusterctl.agent.watch import stack_capture, tcp_connections

if TYPE_CHECKING:
    from collections.abc import Iterable

    from clusterctl.agent.protocol.record_types import EvidenceAnswer, ProcessState, RankEvidence, RankProcess

_WINDOW_S = 0.25
_TAIL_BYTES = 64 * 1024
_TAIL_LINES = 40
_MAX_CHILDREN = 64
_MAX_ANSWER_BYTES = 12 << 20
"""The maximum size of an answer for all ranks together, well below the maximum size of a frame."""


def collect_evidence(
    ranks: Iterable[RankProcess], status_dir: str, out_dir: str, deadline: float, *, only_given_ranks: bool = False
) -> EvidenceAnswer:
    """Collect the evidence of all given ranks in parallel.

    Args:
        ranks: The process of each rank.
        status_dir: The folder with the status files of the attempt's shims.
        out_dir: The folder for `rank-R.json` (complete), `rank-R.txt` (for people) and `rank-R.stacks` (the raw dump).
            A missing folder is created.
        deadline: The `time.monotonic()` until which this function waits.
        only_given_ranks: Whether to leave out the ranks that a user's launcher (torchrun) has started below the given
            ranks.

    Returns:
        The evidence by rank. A rank without evidence at the deadline has `source: "proc"` and an `error`. Evidence that
        is too large for the answer is cut, and `why` names the folder of the complete files.

    Raises:
        OSError: `out_dir` cannot be written.
    """
    began = time.monotonic()
    os.makedirs(out_dir, mode=0o700, exist_ok=True)
    workers = list(ranks)
    for foreign in [] if only_given_ranks else list_foreign_ranks(status_dir, [worker["rank"] for worker in workers]):
        offer = shim_files.read_stack_dump_offer(status_dir, foreign)
        if offer is not None:
            workers.append({"rank": foreign, "pid": offer["pid"], "start_time": offer["start_time"], "output": None})
    complete = dict(sorted(_collect_in_threads(workers, status_dir, deadline).items(), key=lambda item: int(item[0])))
    for rank, evidence in complete.items():
        for ending, text in format_rank_files(evidence).items():
            with open(os.path.join(out_dir, f"rank-{rank}{ending}"), "w", encoding="utf-8") as file:
                file.write(text)
    limit = _MAX_ANSWER_BYTES // max(1, len(complete))
    answer = {rank: _shorten(evidence, limit, out_dir) for rank, evidence in complete.items()}
    return {"took_s": round(time.monotonic() - began, 3), "ranks": answer}


def _collect_in_threads(workers: list[RankProcess], status_dir: str, deadline: float) -> dict[str, RankEvidence]:
    """Return the evidence of each worker, by rank. Each worker has a collecting thread, which may hang."""
    processes = read_all_processes()
    evidence: dict[str, RankEvidence] = {}

    def examine(worker: RankProcess) -> None:
        try:
            evidence[str(worker["rank"])] = _collect_rank(worker, processes, status_dir, deadline)
        except Exception as error:
            evidence[str(worker["rank"])] = _make_empty_evidence(worker, f"the collection failed: {error!r}")

    threads = [threading.Thread(target=examine, args=(worker,), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    for worker in workers:
        evidence.setdefault(str(worker["rank"]), _make_empty_evidence(worker, "no answer in time"))
    return dict(evidence)


def _shorten(evidence: RankEvidence, limit: int, out_dir: str) -> RankEvidence:
    """Return evidence of at most `limit` bytes: cut stacks and output at the beginning if necessary.

    The stack of the main thread comes last, so it is not cut.
    """
    if _count_json_bytes(evidence) <= limit:
        return evidence
    why = [*evidence.get("why", []), f"answer: cut, the complete evidence is in {out_dir}"]
    rest: RankEvidence = {**evidence, "why": why, "stacks": "", "tail": []}
    remaining_bytes = max(0, limit - _count_json_bytes(rest))
    rest["tail"] = _keep_end(evidence["tail"], remaining_bytes // 4)
    rest["stacks"] = _keep_end(evidence["stacks"], remaining_bytes - _count_json_bytes(rest["tail"]))
    return rest


def _keep_end(value: Any, limit: int) -> Any:
    """Return the end of a text or list. The JSON of this end has at most `limit` bytes."""
    while value and (size := _count_json_bytes(value)) > limit:
        value = value[len(value) - len(value) * max(0, limit) // size :] if len(value) > 1 else value[:0]
    return value


def _count_json_bytes(value: object) -> int:
    return len(json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogateescape"))


def _make_empty_evidence(worker: RankProcess, why: str) -> RankEvidence:
    return {
        "rank": worker["rank"],
        "pid": worker["pid"],
        "state": None,
        "wchan": None,
        "source": "proc",
        "why": [],
        "stacks": "",
        "main_thread": None,
        "inside": None,
        "children": [],
        "tail": _read_tail(worker.get("output")),
        "error": why,
    }


def _collect_rank(
    worker: RankProcess, processes: dict[int, proc.ProcessStat], status_dir: str, deadline: float
) -> RankEvidence:
    root = processes.get(worker["pid"])
    if root is None or root.start_time != worker["start_time"] or root.is_gone:
        return _make_empty_evidence(worker, "the worker has ended")
    members = list_process_tree(root.pid, processes)
    subject = find_rank_process(members, status_dir, worker["rank"])
    began, before = time.monotonic(), _read_ticks(members)
    dump = stack_capture.capture_stacks(subject.pid, status_dir, worker["rank"], deadline)
    # During this pause, the kernel's clock ticks often enough to distinguish a spinning process from a waiting process.
    time.sleep(max(0.0, min(began + _WINDOW_S, deadline) - time.monotonic()))
    elapsed = max(time.monotonic() - began, 0.01)
    after = _read_ticks(members)
    shares = {pid: round((ticks - before[pid]) / proc.TICKS_PER_SECOND / elapsed, 2) for pid, ticks in after.items()}
    children = [process for process in members if process.pid != subject.pid][:_MAX_CHILDREN]
    return {
        "rank": worker["rank"],
        # mypy does not know that the result has only the fields of `ProcessState`.
        **_describe_process(subject, shares),  # type: ignore[typeddict-item]
        "threads": subject.threads,
        "source": dump.source,
        "why": list(dump.why),
        "stacks": dump.text,
        "main_thread": dump.main_thread,
        "inside": read_status(status_dir, worker["rank"], time.monotonic()),
        "children": [_describe_process(child, shares) for child in children],
        "tail": _read_tail(worker.get("output")),
        "setup": shim_files.read_group_setup(status_dir, worker["rank"]),
        "recorded": shim_files.read_flight_record(status_dir, worker["rank"]),
        "calls": shim_files.read_call_values(status_dir, worker["rank"], time.monotonic()),
        "sockets": tcp_connections.list_tcp_connections(
            subject.pid, (child.pid for child in list_process_tree(subject.pid, processes)[1 : _MAX_CHILDREN + 1])
        ),
        "lock_holder": proc.find_lock_holder(subject.pid),
    }


def find_rank_process(members: list[proc.ProcessStat], status_dir: str, rank: int) -> proc.ProcessStat:
    """Return the process that is the rank: the process with the shim, else the first Python, else the first process."""
    offer = shim_files.read_stack_dump_offer(status_dir, rank)
    with_shim = [process for process in members if offer and process.pid == offer["pid"]]
    pythons = [process for process in members if _is_python(process.pid)]
    return (with_shim or pythons or members)[0]


def _is_python(pid: int) -> bool:
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")).startswith("python")
    except OSError:
        return False


def _read_ticks(members: list[proc.ProcessStat]) -> dict[int, int]:
    pairs = ((process, proc.read_stat(process.pid)) for process in members)
    return {old.pid: new.ticks if new and new.start_time == old.start_time else old.ticks for old, new in pairs}


def _describe_process(process: proc.ProcessStat, shares: dict[int, float]) -> ProcessState:
    now = proc.read_stat(process.pid)
    return {
        "pid": process.pid,
        "name": process.comm,
        "state": now.state if now else None,
        "wchan": proc.read_wait_channel(process.pid) or None,
        "cpu": shares.get(process.pid, 0.0),
        "command": proc.read_command(process.pid),
    }


def _read_tail(path: str | None) -> list[str]:
    """Return the last lines of an output file."""
    try:
        with open(path or "", "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return file.read().decode("utf-8", "replace").splitlines()[-_TAIL_LINES:]
    except OSError:
        return []
