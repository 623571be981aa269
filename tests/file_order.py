"""The order in which the suite plays its files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

WAITING: Final = ("tests/lab/", "tests/soak/")
"""Folders whose tests mostly wait."""
COMPUTING: Final = ("tests/unit/",)
"""Folders whose tests mostly compute; they run as well in the namespaces of a lab."""
_BEGUN_BY: Final = 0.5


def sort_files(files: Sequence[str]) -> list[str]:
    """Spread the files that wait over those that compute: where all processes wait at a time, cores are idle.

    The other files stay in front. In the last half no file begins that waits: it would go on alone. For the same reason
    these are played from the last to the first: workloads and worlds, which take minutes, have late names.
    """
    kinds = {folders: [f for f in files if f.startswith(folders)] for folders in (WAITING, COMPUTING)}
    places = {f: _BEGUN_BY * i / len(kinds[WAITING]) for i, f in enumerate(reversed(kinds[WAITING]))}
    places |= {f: i / len(kinds[COMPUTING]) for i, f in enumerate(kinds[COMPUTING])}
    return sorted(files, key=lambda f: places.get(f, -1.0))
