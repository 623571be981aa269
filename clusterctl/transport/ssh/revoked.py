"""Host keys that ssh_config revokes (`RevokedHostKeys`): a list of public keys, or a KRL of `ssh-keygen -k`."""

from __future__ import annotations

import base64
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clusterctl.transport.ssh.known_hosts import HostKey

_KRL = b"SSHKRL\n\0"
_QUERY_SECONDS = 10.0


def revoked_at(path: str, key: HostKey) -> int | None:
    """Return the line that revokes `key` (0: a KRL has none), or `None` where the file does not.

    Raises:
        OSError: The file cannot be read, or there is no `ssh-keygen` to read a KRL.
        ValueError: It is neither a list of keys nor a KRL that `ssh-keygen` understands.
    """
    content = Path(path).read_bytes()
    if content.startswith(_KRL):
        return 0 if _in_krl(path, key) else None
    encoded = base64.b64encode(key.blob)
    for number, line in enumerate(content.split(b"\n"), 1):
        fields = line.split()
        if not fields or fields[0].startswith(b"#"):
            continue
        if len(fields) < 2:
            raise ValueError(f"line {number} is not a public key")
        if encoded in fields:
            return number
    return None


def _in_krl(path: str, key: HostKey) -> bool:
    with tempfile.NamedTemporaryFile("w", suffix=".pub") as file:
        file.write(f"{key.type} {base64.b64encode(key.blob).decode()}\n")
        file.flush()
        command = ["ssh-keygen", "-Q", "-f", path, file.name]
        done = subprocess.run(command, capture_output=True, timeout=_QUERY_SECONDS, check=False)
    if done.returncode == 0:
        return False
    if b"REVOKED" in done.stdout:
        return True
    raise ValueError(done.stderr.decode("utf-8", "replace").strip() or "`ssh-keygen -Q` cannot read it")
