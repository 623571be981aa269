"""Evidence of all ranks, from all nodes at once; that of a stall is kept with the run as plain files."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from clusterctl.agent.protocol import command_types, evidence_files
from clusterctl.agent.protocol import record_types as types
from clusterctl.run.nodes.fan_out import call_all
from clusterctl.run.record.disk_files import write_atomically
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.rules import why_evidence
from clusterctl.session.requests import EVIDENCE
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


def collect_evidence(
    run: str, name: str, sessions: Mapping[str, Session], ranks: Collection[int] | None = None
) -> Evidence:
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

    found, errors = call_all(dict(sessions), one)
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


def save_evidence(run: RunDir, name: str, found: Evidence) -> None:
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
    folded = why_evidence.fold_stacks(why_evidence.parse_rank_stacks(found.ranks))
    write_atomically(
        folder / "stacks.txt", "".join(f"{line}\n" for line in why_evidence.format_stacks(folded)).encode()
    )


def find_last_stall(run: RunDir) -> int:
    """Return the highest number of a stall whose evidence the run has; 0 if there is none."""
    names = evidence_files.list_stall_folders(str(run.path))
    return max((int(name.partition("-")[2]) for name in names), default=0)


def collect_stall_evidence(run: RunDir, number: int, sessions: Mapping[str, Session]) -> bool:
    """Collect evidence of a stall into `stall-NUMBER`; return whether it was saved.

    The evidence of the first two stalls and of the last eight is kept, here and on the nodes. A full disk on the head
    costs the files, not the run.
    """
    name = f"stall-{number}"
    try:
        save_evidence(run, name, collect_evidence(run.run, name, sessions))
        evidence_files.remove_middle_stalls(str(run.path))
    except OSError:
        return False
    return True
