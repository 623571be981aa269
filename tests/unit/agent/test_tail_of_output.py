"""The end of an output that a node tells of a rank that failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.agent.supervisor.exit_status import read_output_tail

C_FRAME = "frame #7: <unknown function> + 0xd6df4 (0x7f38d4b0cdf4 in /v/lib/libstdc++.so.6)\n"
THREAD = 'Thread 0x00007f2a1d7fa640 (most recent call first):\n  File "/usr/lib/threading.py", line 331 in wait\n'


@pytest.mark.parametrize(
    ("cause", "frames"),
    [
        pytest.param("  what():  CUDA error: an illegal memory access\n", C_FRAME * 300, id="frames of C++"),
        pytest.param("Fatal Python error: Segmentation fault\n", THREAD * 200, id="threads of faulthandler"),
    ],
)
def test_a_cause_above_thousands_of_bytes_of_frames_is_told(tmp_path: Path, cause: str, frames: str) -> None:
    output = tmp_path / "rank-0.log"
    output.write_text("step\n" * 3000 + cause + frames)

    told = read_output_tail(str(output))

    assert cause in told
    assert len(told) <= 8192


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("step 1\n" + C_FRAME, id="a short one"),
        pytest.param('  File "/w/t.py", line 3, in <module>\n' * 150, id="frames of a traceback"),
        pytest.param('  File "/w/t.py", line 1\n' * 300, id="the place of a syntax error"),
    ],
)
def test_nothing_else_is_left_out(tmp_path: Path, text: str) -> None:
    output = tmp_path / "rank-0.log"
    output.write_text("x" * 9000 * (len(text) > 200) + "\n" + text)

    assert read_output_tail(str(output)).endswith(text[-8192:])
