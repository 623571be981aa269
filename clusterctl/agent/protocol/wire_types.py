"""The types of message fields, each with its bounds. The head derives its validators from these types.

An agent never imports this module, because on the node only the type checker reads the annotations.
"""

from __future__ import annotations

from typing import Annotated, Any

from clusterctl.agent.protocol.validators import COUNT, PID, any_json, any_of, digits, integer, number, string

MAX_DEVICES = 1024
"""The maximum number of GPUs of a node, as in the cluster file."""

Pid = Annotated[int, PID]
Count = Annotated[int, COUNT]
Seq = Annotated[int, integer(0, (1 << 53) - 1)]
Epoch = Seq
Attempt = Annotated[int, integer(-1, 1_000_000)]
Rank = Annotated[int, integer(0, 9_999_999)]
Bytes = Annotated[int, integer(0, 1 << 62)]
StartTime = Annotated[int, integer(0, (1 << 63) - 1)]
"""Clock ticks since boot."""
Port = Annotated[int, integer(0, 65535)]
GpuIndex = Annotated[int, integer(0, MAX_DEVICES - 1)]
FileNumber = Annotated[int, integer(0, 1 << 32)]
ExitCode = Annotated[int, integer(-(1 << 31), (1 << 31) - 1)]
ProgramExitCode = Annotated[int, integer(0, 255)]
Signal = Annotated[int, integer(0, 127)]
SignalSent = Annotated[int, integer(1, 127)]
NonNegative = Annotated[float, number(0.0)]
Measured = Annotated[float, number(-1e20, 1e20)]
ProcessFlags = Annotated[str, string(8)]
"""The state and flags of a process, as in the column STAT of `ps`."""
ShortText = Annotated[str, string(64)]
Address = Annotated[str, string(128)]
Digest = Address
Word = Annotated[str, string(200)]
Name = Annotated[str, string(1024)]
WatchedPath = Annotated[str, string(4096)]
Path = Annotated[str, string(8192)]
Text = Path
LongText = Annotated[str, string(16384)]
Traceback = Annotated[str, string(32768)]
Reason = Annotated[str, string(65536)]
CommandLine = Annotated[str, string(1 << 20)]
FileData = Annotated[str, string(16 << 20)]
Digits = Annotated[str, digits()]
"""A number that is the key of a JSON object."""
Data = Annotated[Any, any_json(12, 100_000, 1 << 20)]
DisplayedFact = Annotated[Any, any_json(3, 256, 200)]
_COUNT_OR_TEXT = any_of(COUNT, string(200))


def _check_setting(value: Any) -> None:
    """Accept a boolean, a count or a text. Booleans are frequent, so they are tested first, without an exception."""
    if not isinstance(value, bool):
        _COUNT_OR_TEXT(value)


Setting = Annotated[Any, _check_setting]
