"""A clock that leaps, for everything that is started with it: see `leap.c`."""

from __future__ import annotations

import mmap
import struct
import time
from pathlib import Path

from tests.compiled import compiled

SOURCE = Path(__file__).with_name("leap.c")
_NS = struct.Struct("<q")
_LEAPS_A_SECOND = 4


class Clock:
    """How far the clocks of some processes are ahead of those of this machine.

    Attributes:
        environment: What to start those processes with.
        ahead: Seconds.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "ahead"
        path.write_bytes(_NS.pack(0))
        with path.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), _NS.size)
        library = compiled(SOURCE, "libleap.so", "-shared", "-fPIC") / "libleap.so"
        self.environment = {"LD_PRELOAD": str(library), "LEAP": str(path)}
        self.ahead = 0.0

    def leap(self, seconds: float) -> None:
        """Move the clocks on."""
        self.ahead += seconds
        _NS.pack_into(self._shared, 0, round(self.ahead * 1e9))

    def monotonic(self) -> float:
        """Return what those clocks say that do not go back."""
        return time.monotonic() + self.ahead

    def second(self, end: float, real: float) -> None:
        """Let the time until `end` of `monotonic`, which is a second away, go by in `real` seconds, or in more.

        It goes by in several leaps, so that what is due amid a second is not a second late.
        """
        for left in reversed(range(_LEAPS_A_SECOND)):
            self.leap(max(0.0, end - left / _LEAPS_A_SECOND - real / _LEAPS_A_SECOND - self.monotonic()))
            time.sleep(real / _LEAPS_A_SECOND)
