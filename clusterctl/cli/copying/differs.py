"""What a push would do to nodes, in lines: how much of what, and the largest files first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.config.host_ranges import fold_hosts
from clusterctl.formatting import format_size, plural
from clusterctl.render.console import safe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clusterctl.run.nodes.transfer import Differs

_MOST = 20


def differs_lines(nodes: Sequence[str], found: Differs, of_all: int) -> list[str]:
    """Return what nodes that differ alike would be sent, and what they would lose.

    Args:
        nodes: Which.
        found: How they differ from the code folder.
        of_all: How many files that has.
    """
    total = sum(length for _, length in found.needed)
    parts = [f"{len(found.needed)} of {plural(of_all, 'file')} would be sent, {format_size(total)}"]
    if found.going:
        parts.append(f"{found.going} would be removed")
    if found.user is not None:
        parts.append(f"refused while run {found.user} uses the folder")
    sent = sorted(found.needed, key=lambda file: (-file[1], file[0]))
    return [
        f"{fold_hosts(nodes)}: {'; '.join(parts)}",
        *(f"  send    {format_size(length):>9}  {safe(path)}" for path, length in sent[:_MOST]),
        *_more(len(sent)),
        *(f"  remove  {'':9}  {safe(path)}" for path in found.gone[:_MOST]),
        *_more(found.going),
    ]


def _more(number: int) -> list[str]:
    return [f"  and {number - _MOST} more"] if number > _MOST else []
