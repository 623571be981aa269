"""Reservations: claims on GPUs that no run holds, but a process of their own, for a limited time."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING

from clusterctl.agent.facts.claim_files import RESERVATION, SHARED, Record, get_host_file_name, list_records
from clusterctl.agent.linux import spawn, syscalls
from clusterctl.agent.protocol import command_messages
from clusterctl.agent.supervisor.gpu_claims import GpuClaimError, GpuClaims

if TYPE_CHECKING:
    from clusterctl.agent.protocol import command_payload_types
    from clusterctl.agent.serve.agent_session import AgentSession

_LOOK_S = 1.0
_RELEASE_TIMEOUT_S = 5.0
_READY = b"ready"


def handle_reserve(
    session: AgentSession, request_id: int, arguments: command_payload_types.ReserveArguments, _epoch: int | None
) -> None:
    """Reserve GPUs, or give reservations of this user and head back; a helper process waits for the outcome."""
    session.run_task(request_id, lambda _out: reserve(arguments))


def reserve(arguments: command_payload_types.ReserveArguments, shared: str = SHARED) -> dict[str, object]:
    """Start a process that holds GPUs for `seconds`, then end the earlier reservations of this user and head.

    With 0 seconds, only end them. The process counts the time by a clock that also runs while the machine sleeps.

    Raises:
        RequestError: A GPU is not free, or an earlier reservation does not end.
    """
    head, seconds = str(arguments["head"]), float(arguments["seconds"])
    earlier = [record for record in list_records(shared) if record.is_reservation_of(head)]
    if seconds > 0:
        pid, read, write = syscalls.fork_with_pipes()
        if pid == 0:
            _detach_and_hold(arguments, shared, write)
        os.close(write)
        with open(read, "rb") as report:
            outcome = report.read()
        if outcome != _READY:
            raise command_messages.make_refused_error(outcome.decode() or "the process of the reservation has died")
    for record in earlier:
        _end_reservation(record)
    return {"ended": len(earlier)}


def _end_reservation(record: Record) -> None:
    """Remove the file that describes a reservation; its process notices that, and gives the GPUs back."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(record.folder, get_host_file_name()))
    deadline = time.monotonic() + _RELEASE_TIMEOUT_S
    while os.path.exists(record.folder):
        if time.monotonic() > deadline:
            raise command_messages.make_failed_error(f"the process of the reservation in {record.folder} does not end")
        syscalls.sleep_interval(0.05)


def _detach_and_hold(arguments: command_payload_types.ReserveArguments, shared: str, report: int) -> None:
    try:
        os.setsid()
        if os.fork() == 0:
            os.chdir("/")
            spawn.reset_signals()
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            spawn.redirect_stdio(stderr=os.open(os.devnull, os.O_WRONLY))
            spawn.close_descriptors({report})
            syscalls.set_process_name("clusterctl-resv")
            syscalls.set_process_title("clusterctl-agent reservation")
            _hold(arguments, shared, report)
    finally:
        os._exit(0)


def _hold(arguments: command_payload_types.ReserveArguments, shared: str, report: int) -> None:
    began, now, seconds = syscalls.read_boot_time(), time.time(), float(arguments["seconds"])
    claims = GpuClaims(str(arguments["name"]), str(arguments["node"]), shared, head=str(arguments["head"]))
    try:
        claims.claim([int(index) for index in arguments["gpus"]])
        about = {key: str(arguments[key]) for key in ("name", "head", "note")}
        claims.announce({**about, "kind": RESERVATION, "since": round(now), "until": round(now + seconds)})
    except GpuClaimError as error:
        os.write(report, str(error).encode())
        return
    os.write(report, _READY)
    os.close(report)
    while syscalls.read_boot_time() - began < seconds and all(map(os.path.exists, claims.paths)):
        time.sleep(_LOOK_S)
    claims.release()
