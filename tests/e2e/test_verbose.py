"""`-v`: what every node says of itself, where the usual view folds it or is silent."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.e2e.conftest import LocalHead


def test_what_each_node_reports_is_told_to_who_wants_to_hear_it(head: LocalHead) -> None:
    head.write_local({"command": 'exit "$RANK"', "grace": "1s"}, (1, 1))

    told = head.run("up", "-v", "--no-health").stderr
    usual = head.run("up", "--no-health").stderr
    head.write_local({"command": "sleep 600", "grace": "1s"}, (1, 1))
    head.start()
    ended = head.run("down", "-v").stderr
    codes = head.run("exec", "-v", "--", "true").stderr

    for node, rank in ((0, 0), (1, 1)):
        said = re.findall(rf"^localhost\.{node}: (.+)$", told, re.MULTILINE)
        assert said[0] == "ready for attempt 0"
        assert re.fullmatch(rf"r{rank} started, pid \d+", said[1])
        assert f"r{rank} ended with exit code {rank}" in said
        assert "nothing is left of attempt 0" in said[-1]
        assert f"localhost.{node}: r{rank} ended by SIGTERM, stopped\n" in ended
    assert "started" not in ended
    assert not re.search(r"^localhost\.[01]: ", usual, re.MULTILINE)
    assert codes == "localhost.[0-1] (2 nodes): exit code 0\n"
