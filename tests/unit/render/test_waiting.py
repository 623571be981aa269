from __future__ import annotations

from clusterctl.render.start_progress import format_waiting_line


def test_who_waits_says_for_whom_and_until_when() -> None:
    assert format_waiting_line({"n2": "connecting", "n3": "connecting"}, 3.2, 10.0) == (
        "waiting for n[2-3]: connecting, 3 s, given up after 10 s"
    )


def test_no_limit_is_told_of_what_has_none() -> None:
    assert format_waiting_line({"n2": "sending the agent"}, 12.0, 10.0) == "waiting for n2: sending the agent, 12 s"
