"""What the parts of the zygote share: its connection with the supervisor."""

from __future__ import annotations

control = -1

changes: dict[bytes, bytes] = {}
"""Variables that what was imported has set for all that comes after it."""
