"""Evidence of all ranks, from all nodes at once; that of a stall is kept with the run as plain files."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from clusterctl.agent.protocol import evidence_files
from clusterctl.run.nodes.fan_out import each
from clusterctl.run.record.disk_files import write_atomically
from clusterctl.run.rules import rank_stacks
from clusterctl.session.requests import EVIDENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from clusterctl.agent.protocol import command_types
    from clusterctl.agent.protocol import process_types as types
    from clusterctl.run.record.rundir import RunDir
    from clusterctl.session.session import Session

_DEADLINE = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the nodes answered.

    Attributes:
        ranks: Rank to its evidence (`ranks` of `clusterctl.agent.watch.evidence.collect`), with the `node` it is of.
        errors: Node to why it gave nothing.
    """

    ranks: Mapping[str, types.RankEvidence] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)


def ask(run: str, name: str, sessions: Mapping[str, Session], ranks: Collection[int] | None = None) -> Evidence:
    """Ask every node for states and stacks of its ranks.

    Args:
        run: The run's id.
        name: Folder on the nodes, where they keep it too.
        sessions: One for every node that can be asked.
        ranks: Only these; default all.
    """

    def one(node: str, session: Session) -> types.EvidenceAnswer:
        wanted = None if ranks is None else sorted(ranks)
        request: command_types.EvidenceArguments = {
            "run": run,
            "node": node,
            "name": name,
            "ranks": wanted,
            "deadline": _DEADLINE,
        }
        return EVIDENCE.call(session, request)

    found, errors = each(dict(sessions), one)
    known: dict[str, types.RankEvidence] = {}
    for node, answer in found.items():
        for rank, said in answer["ranks"].items():
            # A launcher such as torchrun stands under the number of a rank that may be on another node.
            if rank not in known or not known[rank].get("inside"):
                known[rank] = {**said, "node": node}
    return Evidence(
        ranks={rank: known[rank] for rank in sorted(known, key=int)},
        errors={node: str(error) for node, error in errors.items()},
    )


def keep(run: RunDir, name: str, found: Evidence) -> None:
    """Write evidence into a folder of the run.

    `rank-R.txt` (for people), `.json`, `.stacks` (as dumped); `stacks.txt` with all ranks, equal stacks folded; and
    `NODE.error` for a node that gave nothing.
    """
    folder = run.path / name
    folder.mkdir(exist_ok=True)
    for rank, said in found.ranks.items():
        for ending, text in evidence_files.format_rank_files(said).items():
            write_atomically(folder / f"rank-{rank}{ending}", text.encode())
    for node, error in found.errors.items():
        write_atomically(folder / f"{node}.error", f"{error}\n".encode())
    folded = rank_stacks.fold_stacks(rank_stacks.parse_rank_stacks(found.ranks))
    write_atomically(folder / "stacks.txt", "".join(f"{line}\n" for line in rank_stacks.format_stacks(folded)).encode())


class Gatherer:
    """Gathers evidence of stalls beside the controller's loop, into `stall-1`, `stall-2` and so on.

    That of the first two and of the last eight is kept, here and on the nodes.

    Args:
        run: The run.
        kept: Called, in a thread, when evidence of a stall that is confirmed is whole.
    """

    def __init__(self, run: RunDir, kept: Callable[[], None]) -> None:
        self._run, self._kept = run, kept
        self._count = max(
            (int(name.partition("-")[2]) for name in evidence_files.list_stall_folders(str(run.path))), default=0
        )
        self._under_way: list[threading.Thread] = []

    @property
    def busy(self) -> bool:
        """Whether evidence is still on its way; nobody should be ended before it is there."""
        self._under_way = [thread for thread in self._under_way if thread.is_alive()]
        return bool(self._under_way)

    def begin(self, sessions: Mapping[str, Session], *, confirmed: bool) -> str:
        """Start to gather; return the folder of the run where it will lie."""
        self._count += 1
        name = f"stall-{self._count}"
        thread = threading.Thread(target=self._gather, args=(name, dict(sessions), confirmed), name=name, daemon=True)
        self._under_way.append(thread)
        thread.start()
        return name

    def _gather(self, name: str, sessions: Mapping[str, Session], confirmed: bool) -> None:
        # A full disk on the head costs the files, not the run.
        with contextlib.suppress(OSError):
            keep(self._run, name, ask(self._run.run, name, sessions))
            evidence_files.remove_middle_stalls(str(self._run.path))
            if confirmed:
                self._kept()
