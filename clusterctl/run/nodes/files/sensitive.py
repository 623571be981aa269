"""Files among the code that look like secrets: everything is sent that nothing leaves out."""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_LIKE_SECRETS = (
    ".env",
    ".env.*",
    "*.env",
    "*.env.local",
    "*.pem",
    "id_*",
    ".netrc",
    "credentials*",
    ".git-credentials",
)
_PUBLIC = ("*.pub", ".env.example", "*.py")


def sentence(paths: Iterable[str]) -> str | None:
    """Return what to say of files that look like secrets, or `None` where there are none."""
    secret = sorted(path for path in paths if _looks_secret(path.rpartition("/")[2]))
    if not secret:
        return None
    more = f" and {len(secret) - 3} more" if len(secret) > 3 else ""
    named = ", ".join(f"`{path}`" for path in secret[:3])
    return f"{named}{more} may hold secrets and are sent to the nodes: add them to `sync.exclude` or .gitignore"


def _looks_secret(name: str) -> bool:
    if any(fnmatch.fnmatchcase(name, pattern) for pattern in _PUBLIC):
        return False
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in _LIKE_SECRETS)
