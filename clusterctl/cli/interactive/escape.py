"""What a person types to leave a terminal on a node that does not answer any more: `~.` at the beginning of a line."""

from __future__ import annotations

from dataclasses import dataclass

_LINE_ENDS = b"\r\n"


@dataclass(frozen=True, slots=True)
class Typed:
    """What was typed so far, as far as it matters.

    Attributes:
        line_begins: The next character is the first of a line.
        tilde: That first one was a `~`, which was kept back.
    """

    line_begins: bool = True
    tilde: bool = False


def sift(before: Typed, data: bytes) -> tuple[Typed, bytes, bool]:
    """Return what was typed by now, what of it goes to the node, and whether the person wants to leave.

    `~~` at the beginning of a line is one `~`, as ssh has it.
    """
    line_begins, tilde, passed = before.line_begins, before.tilde, bytearray()
    for byte in data:
        character = bytes((byte,))
        if tilde:
            tilde, line_begins = False, False
            if character == b".":
                return Typed(), bytes(passed), True
            passed += b"~" if character == b"~" else b"~" + character
            line_begins = character in _LINE_ENDS
        elif line_begins and character == b"~":
            tilde = True
        else:
            passed += character
            line_begins = byte in _LINE_ENDS
    return Typed(line_begins, tilde), bytes(passed), False
