"""Lines of JSON, which people see as well as machines: nothing in them steers or fools a terminal."""

from __future__ import annotations

import json
import re
from typing import Any

from clusterctl.logs.sanitize import CONTROL_CHARACTERS, STRAY_JOINER

_NOTED = re.compile(f"[{CONTROL_CHARACTERS}]{STRAY_JOINER}")


def json_line(value: Any) -> str:
    """Return a value as one line of JSON whose letters are readable in any script; what steers or hides is escaped."""
    return _NOTED.sub(_escape, json.dumps(value, ensure_ascii=False))


def _escape(match: re.Match[str]) -> str:
    return json.dumps(match[0])[1:-1]
