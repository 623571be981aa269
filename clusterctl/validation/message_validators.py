"""Validators of pushed messages, heartbeat answers, the preamble, error answers and stored evidence."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from clusterctl.agent.protocol import command_payload_types
from clusterctl.agent.protocol.frames import FrameError
from clusterctl.agent.protocol.record_types import RankEvidence
from clusterctl.agent.protocol.run_files import SAMPLES_FILE
from clusterctl.agent.protocol.validators import ValidationError
from clusterctl.validation.derived_validators import derive_object_validator

if TYPE_CHECKING:
    from clusterctl.agent.protocol.command_messages import Command

HEARTBEAT_ANSWER = derive_object_validator(command_payload_types.HeartbeatAnswer)
EVENT_PUSH = derive_object_validator(command_payload_types.EventPush)
STREAM_PUSH = derive_object_validator(command_payload_types.StreamPush)
ATTEMPTS_REPLICATED_PUSH = derive_object_validator(command_payload_types.AttemptsSentPush)
PREAMBLE = derive_object_validator(command_payload_types.Preamble)
_ERROR = derive_object_validator(command_payload_types.ErrorAnswer)
_EVIDENCE = derive_object_validator(RankEvidence)
_MAX_MESSAGE_CHARS = 8192
_STREAM_FILE = re.compile(r"attempt-(0|[1-9][0-9]{0,6})/rank-(0|[1-9][0-9]{0,6})\.(?:log|idx)")


def validate_rank_evidence(value: Any) -> RankEvidence:
    """Return the stored evidence of a rank, if all its fields are valid.

    Raises:
        FrameError: A field of the evidence is missing or invalid.
    """
    try:
        _EVIDENCE(value)
    except ValidationError as error:
        raise FrameError(f"evidence of a rank: {error}") from None
    evidence: RankEvidence = value
    return evidence


def validate_error_answer(command: Command, value: Any) -> dict[str, Any]:
    """Return the error answer of a node to a command, with its texts cut to `_MAX_MESSAGE_CHARS`.

    Raises:
        FrameError: The value is not an error answer.
    """
    try:
        _ERROR(value)
    except ValidationError as error:
        raise FrameError(f"its refusal of `{command.value}`: {error}") from None
    hint = value.get("hint")
    return {**value, "message": value["message"][:_MAX_MESSAGE_CHARS], "hint": hint and hint[:_MAX_MESSAGE_CHARS]}


def parse_stream_file_name(file: str) -> tuple[int, int] | None:
    """Return the attempt and rank in the file name of a stream; `None` for the file of samples.

    Raises:
        FrameError: A node sends no file of this name.
    """
    if file == SAMPLES_FILE:
        return None
    match = _STREAM_FILE.fullmatch(file)
    if match is None:
        raise FrameError(f"it names a file that does not belong to a run: {file[:80]!a}")
    return int(match[1]), int(match[2])
