"""Files among the code that look like secrets: everything is sent that nothing leaves out."""

from __future__ import annotations

import fnmatch
import itertools
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_LIKE_SECRETS = (
    # keys
    "*.pem",
    "*.key",
    "*.p12",
    "*.pfx",
    "*.jks",
    "*.keystore",
    "*.kdbx",
    "*.ppk",
    "id_*",
    "key.json",
    "*[-_]key.json",
    "*service[-_]account*.json",
    "client_secret*.json",
    "kaggle.json",
    # variables and passwords
    ".env",
    ".env.*",
    "*.env",
    "*.env.local",
    ".envrc",
    ".netrc",
    "_netrc",
    ".pgpass",
    ".my.cnf",
    ".htpasswd",
    ".npmrc",
    ".pypirc",
    ".s3cfg",
    ".boto",
    "rclone.conf",
    "credentials*",
    "*_credentials.json",
    ".git-credentials",
    "secret",
    "secrets",
    "secrets.*",
    # tokens
    "token",
    "token.txt",
    "token.json",
    ".token",
    "*.token",
    "*[-_]token",
    "*[-_]token.txt",
    "stored_tokens",
    ".*-token",
    # what a shell or another program was told
    ".*_history",
    "*_history",
    # in the folders of programs
    ".aws/*",
    ".azure/*",
    ".kube/*",
    "kubeconfig",
    "*.kubeconfig",
    ".docker/config.json",
    ".dockercfg",
    "gcloud/*",
    ".gnupg/*",
    "gh/hosts.yml",
    "glab-cli/config.yml",
    "huggingface/token*",
)
_PUBLIC = ("*.pub", ".env.example", ".env.sample", ".env.template", "*.py", "*.ipynb", "*.md", "*.rst")
_KEY = re.compile(rb"-----BEGIN [A-Z0-9 ]*PRIVATE KEY|PuTTY-User-Key-File")
LARGEST_KEY_BYTES = 16 * 1024


def sentence(files: Iterable[tuple[str, int]], beginning: Callable[[str], bytes]) -> str | None:
    """Return what to say of files that look like secrets, or `None` where there are none.

    Args:
        files: Path and size of each.
        beginning: Reads the first bytes of one.
    """
    secret = sorted(path for path, size in files if _looks_secret(path, size, beginning))
    if not secret:
        return None
    more = f" and {len(secret) - 3} more" if len(secret) > 3 else ""
    named = ", ".join(f"`{path}`" for path in secret[:3])
    return f"{named}{more} may hold secrets and are sent to the nodes: add them to `sync.exclude` or .gitignore"


def _looks_secret(path: str, size: int, beginning: Callable[[str], bytes]) -> bool:
    if any(fnmatch.fnmatchcase(path.lower().rpartition("/")[2], pattern) for pattern in _PUBLIC):
        return False
    return is_named_like_a_secret(path) or (
        64 <= size <= LARGEST_KEY_BYTES and _KEY.search(beginning(path)) is not None
    )


def is_named_like_a_secret(path: str) -> bool:
    """Return whether files of this name hold keys, tokens or passwords."""
    parts = path.lower().rstrip("/").split("/")
    # A pattern of two parts means the folder too, and all that is in it.
    pairs = ["/".join(pair) for pair in itertools.pairwise(parts)]
    return any(fnmatch.fnmatchcase(tried, pattern) for pattern in _LIKE_SECRETS for tried in (parts[-1], *pairs))
