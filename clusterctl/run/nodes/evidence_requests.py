"""Collects evidence of ranks, such as stacks, from all nodes at once; evidence of a stall is saved with the run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from clusterctl.agent.protocol import record_types as types
from clusterctl.agent.protocol import stall_folders
from clusterctl.run.nodes.fan_out import call_all
from clusterctl.run.record.disk_files import write_atomically
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.rules import stack_dump_parser
from clusterctl.session.node_session import Session
from clusterctl.session.request_definitions import EVIDENCE

_DEADLINE_S = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedEvidence:
    """The evidence from all nodes, and the nodes without an answer.

    Attributes:
        ranks: The evidence of each rank. The entry `node` of the evidence is the name of the node.
        errors: For each node without an answer: the reason.
    """

    ranks: Mapping[str, types.RankEvidence] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)


def request_evidence(
    run: str, name: str, sessions: Mapping[str, Session], ranks: Collection[int] | None = None
) -> CollectedEvidence:
    """Ask every node for states and stacks of its ranks.

    Args:
        run: The id of the run.
        name: Name of the folder in which each node also saves the evidence.
        sessions: The sessions by node.
        ranks: The ranks; all by default.
    """
    wanted = None if ranks is None else sorted(ranks)

    def ask(node: str, session: Session) -> types.EvidenceAnswer:
        return EVIDENCE.call(
            session, {"run": run, "node": node, "name": name, "ranks": wanted, "deadline": _DEADLINE_S}
        )

    found, errors = call_all(sessions, ask)
    known: dict[str, types.RankEvidence] = {}
    for node, answer in found.items():
        for rank, evidence in answer["ranks"].items():
            # A launcher such as torchrun may have the number of a rank although the rank itself is on another node.
            if rank not in known or not known[rank].get("inside"):
                known[rank] = {**evidence, "node": node}
    return CollectedEvidence(
        ranks={rank: known[rank] for rank in sorted(known, key=int)},
        errors={node: str(error) for node, error in errors.items()},
    )


def save_evidence(run: RunDir, name: str, found: CollectedEvidence) -> None:
    """Write evidence into a folder of the run.

    The folder gets `rank-R.txt` (to read), `.json` and `.stacks` (as dumped) for each rank, `stacks.txt` with the
    folded stacks of all ranks, and `NODE.error` for a node without evidence.
    """
    folder = run.path / name
    folder.mkdir(exist_ok=True)
    for rank, evidence in found.ranks.items():
        for ending, text in stall_folders.format_rank_files(evidence).items():
            write_atomically(folder / f"rank-{rank}{ending}", text.encode())
    for node, error in found.errors.items():
        write_atomically(folder / f"{node}.error", f"{error}\n".encode())
    folded = stack_dump_parser.fold_stacks(stack_dump_parser.parse_rank_stacks(found.ranks))
    write_atomically(
        folder / "stacks.txt", "".join(f"{line}\n" for line in stack_dump_parser.format_stacks(folded)).encode()
    )


def find_last_stall(run: RunDir) -> int:
    """Return the highest number of a stall with saved evidence; 0 without saved evidence."""
    names = stall_folders.list_stall_folders(str(run.path))
    return max((int(name.partition("-")[2]) for name in names), default=0)


def collect_stall_evidence(run: RunDir, number: int, sessions: Mapping[str, Session]) -> bool:
    """Save evidence of a stall in the folder `stall-NUMBER`; return whether evidence was saved.

    Head and nodes keep the evidence of the first two stalls and of the last eight. A full disk on the head does not
    disturb the run.
    """
    name = f"stall-{number}"
    try:
        save_evidence(run, name, request_evidence(run.run, name, sessions))
        stall_folders.remove_middle_stall_folders(str(run.path))
    except OSError:
        return False
    return True
