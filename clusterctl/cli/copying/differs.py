"""What a push would do to nodes, in lines: how much of what, and the largest files first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.config.host_ranges import fold_hosts
from clusterctl.formatting import format_size, plural
from clusterctl.render.console import safe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clusterctl.run.nodes.uploads import SyncPreview

_MOST = 20


def differs_lines(nodes: Sequence[str], found: SyncPreview, of_all: int) -> list[str]:
    """Return what nodes that differ alike would be sent, and what they would lose.

    Args:
        nodes: Which.
        found: How they differ from the code folder.
        of_all: How many files that has.
    """
    total = sum(length for _, length in found.files_to_send)
    parts = [f"{len(found.files_to_send)} of {plural(of_all, 'file')} would be sent, {format_size(total)}"]
    if found.removal_count:
        parts.append(f"{found.removal_count} would be removed")
    if found.active_run is not None:
        parts.append(f"refused while run {found.active_run} uses the folder")
    sent = sorted(found.files_to_send, key=lambda file: (-file[1], file[0]))
    return [
        f"{fold_hosts(nodes)}: {'; '.join(parts)}",
        *(f"  send    {format_size(length):>9}  {safe(path)}" for path, length in sent[:_MOST]),
        *_more(len(sent)),
        *(f"  remove  {'':9}  {safe(path)}" for path in found.removed_paths[:_MOST]),
        *_more(found.removal_count),
    ]


def _more(number: int) -> list[str]:
    return [f"  and {number - _MOST} more"] if number > _MOST else []
