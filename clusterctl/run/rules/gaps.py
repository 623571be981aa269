"""A node's journal that arrives with a number missing: what to do about it. Pure.

Nothing may be concluded from what comes behind a gap: the event that is missing may be the end of a rank. The node is
asked once more for all that follows; where the gap is still there the session is at fault, and is closed. A gap that
another session shows again is in the journal itself, and is passed over, for waiting would not fill it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Step(str, Enum):
    """What to do with an event."""

    TAKE = "take"
    ASK_AGAIN = "ask again"
    LEAVE = "leave"
    HANG_UP = "hang up"
    PASS_OVER = "pass over"


@dataclass
class _Gap:
    behind: int
    session: object
    asked: bool = False
    hung_up: bool = False


class Gaps:
    """The gaps of all nodes of a run."""

    def __init__(self) -> None:
        self._gaps: dict[str, _Gap] = {}

    def judge(self, node: str, known: int, seq: int, session: object) -> Step:
        """Return what to do with the event number `seq` of a node of which number `known` was the last to be taken in.

        Args:
            node: Whose.
            known: The last number that was taken in.
            seq: That of the event, above `known`.
            session: The session that there is to the node.
        """
        gap = self._gaps.get(node)
        if seq == known + 1:
            self._gaps.pop(node, None)
            return Step.TAKE
        if gap is None or gap.behind != known:
            self._gaps[node] = _Gap(known, session)
            return Step.ASK_AGAIN
        if session is not gap.session:
            del self._gaps[node]
            return Step.PASS_OVER
        if not gap.asked or gap.hung_up:
            return Step.LEAVE
        gap.hung_up = True
        return Step.HANG_UP

    def asked_again(self, node: str) -> None:
        """Take note that all that was on its way before a node was asked again has been judged."""
        if node in self._gaps:
            self._gaps[node].asked = True
