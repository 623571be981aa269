"""Asking the controller of a run; a run without one gets a new one, and one out of reach is named."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from clusterctl.errors import ClusterctlError, RefusedError
from clusterctl.run.controller import control_socket, process

if TYPE_CHECKING:
    from collections.abc import Callable

    from clusterctl.run.record.rundir import RunDir

_ANSWER_SECONDS = 15.0
_PATIENCE = 5.0
"""Seconds in which a controller that has just begun, or is about to end, is heard or gone."""
_PAUSE = 0.1


def ask_or_adopt(
    run: RunDir, command: str, arguments: dict[str, Any], adopt: Callable[[], int]
) -> dict[str, Any] | None:
    """Return the controller's answer; `None` where there was none and a new process does `adopt`.

    Raises:
        RefusedError: A controller holds the run that cannot be asked from here.
        ControllerEndedError: The new controller ended at its start.
    """
    until = time.monotonic() + _PATIENCE
    while True:
        try:
            return control_socket.send_request(run, command, arguments, timeout=_ANSWER_SECONDS)
        except control_socket.NoControllerError as error:
            reason = error
        if not run.is_attended and _adopted(run, adopt):
            return None
        if time.monotonic() > until:
            raise _out_of_reach(run, reason) from reason
        time.sleep(_PAUSE)


def _adopted(run: RunDir, adopt: Callable[[], int]) -> bool:
    """Return whether a new controller is at work; False where another command was faster."""
    try:
        process.detach(run, adopt)
    except ClusterctlError:
        if not run.is_attended:
            raise
        return False
    return True


def _out_of_reach(run: RunDir, error: control_socket.NoControllerError) -> RefusedError:
    controller = run.controller
    where = "an unknown machine" if controller is None else f"{controller.host} (pid {controller.pid})"
    if isinstance(error, control_socket.SilentControllerError):
        ends = "ending it" if controller is None else f"`kill -9 {controller.pid}` there"
        return RefusedError(
            f"the controller of {run.run} does not answer; it runs on {where}",
            hint=f"{ends} ends the controller and not the run; then ask again",
        )
    return RefusedError(
        f"the controller of {run.run} cannot be asked from here; it runs on {where}",
        hint="run this command there",
    )
