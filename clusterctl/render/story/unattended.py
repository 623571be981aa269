"""What becomes of a run whose controller is gone, and how that is told."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from clusterctl.formatting import duration_text
from clusterctl.run.rules.state import RunPhase


class Fate(Enum):
    """What its nodes do with a run of which they hear no more."""

    GOES_ON = "goes on"
    WILL_STOP = "will stop"
    STOPPING = "stopping"
    STOPPED = "stopped"
    WAITS = "waits"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unattended:
    """A run without a controller.

    Attributes:
        left: Seconds until its nodes stop the workers, where they will.
        limit: Seconds of `on_controller_loss.stop_after`, or `None` where the run is kept.
    """

    fate: Fate = Fate.GOES_ON
    left: float = 0.0
    limit: float | None = None

    @property
    def told(self) -> str:
        """What becomes of it, to stand behind `no controller is alive; `."""
        rule = "" if self.limit is None else f" (on_controller_loss.stop_after {duration_text(self.limit)})"
        match self.fate:
            case Fate.GOES_ON:
                return "the run goes on"
            case Fate.WILL_STOP:
                return f"its nodes stop the workers in {duration_text(self.left)} unless it is adopted"
            case Fate.STOPPING:
                return f"its nodes stop the workers now{rule}"
            case Fate.STOPPED:
                return f"its nodes have stopped the workers by now{rule}"
            case Fate.WAITS:
                return "no worker runs until it is adopted"

    @property
    def short(self) -> str:
        """What becomes of it, for a column: no longer than there is room for on a narrow terminal."""
        match self.fate:
            case Fate.GOES_ON:
                return "unattended"
            case Fate.WILL_STOP:
                return f"unattended: stops in {duration_text(self.left)}"
            case Fate.STOPPING:
                return "unattended: stops now"
            case Fate.STOPPED:
                return "unattended: stopped"
            case Fate.WAITS:
                return "unattended: waits"

    def error(self, run: str) -> str:
        """Return what ends a command that followed the run."""
        if self.fate is Fate.GOES_ON:
            return f"{run} goes on without a controller"
        return f"{run} has no controller: {self.told}"


def fate_of(phase: RunPhase, silent: float, stop_after: float | None, fence: float | None) -> Unattended:
    """Return what becomes of a run without a controller.

    Args:
        phase: Where it was when its controller wrote last.
        silent: Seconds since the last sign of its controller.
        stop_after: Seconds after which its nodes stop the workers; `None`: they let them go on.
        fence: Seconds after which they have surely stopped them (`Limits.fence`).
    """
    if phase is RunPhase.RESTARTING:
        return Unattended(fate=Fate.WAITS)
    if stop_after is None or fence is None:
        return Unattended()
    # A clock of the head that was set back makes the last sign one of the future.
    left = stop_after - max(0.0, silent)
    if left > 0:
        return Unattended(fate=Fate.WILL_STOP, left=left, limit=stop_after)
    return Unattended(fate=Fate.STOPPED if silent >= fence else Fate.STOPPING, limit=stop_after)
