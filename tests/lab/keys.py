"""Keys, certificates and password hashes of the lab."""

from __future__ import annotations

import ctypes
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def make_key(path: Path, kind: str = "ed25519", comment: str = "lab") -> Path:
    """Generate a key pair without a passphrase unless it exists; returns the private key's path."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        argv = ["ssh-keygen", "-q", "-t", kind, "-N", "", "-C", comment, "-f", str(path)]
        subprocess.run(argv, check=True, stdin=subprocess.DEVNULL)
    return path


def public(path: Path) -> str:
    """The public half of a key pair, one line without its end."""
    return path.with_name(path.name + ".pub").read_text().strip()


def certify(ca: Path, key: Path, principals: str, *, host: bool = False, validity: str = "-1d:+30d") -> Path:
    """Sign a key with a CA; returns the certificate's path (`<key>-cert.pub`)."""
    kind = ["-h"] if host else []
    argv = ["ssh-keygen", "-q", "-s", str(ca), "-I", "lab", *kind, "-n", principals, "-V", validity]
    subprocess.run([*argv, str(key.with_name(key.name + ".pub"))], check=True, stdin=subprocess.DEVNULL)
    return key.with_name(key.name + "-cert.pub")


def hash_password(password: str) -> str:
    """A SHA-512 crypt hash for /etc/shadow (Python's own `crypt` is gone from 3.13)."""
    crypt = ctypes.CDLL("libcrypt.so.1").crypt
    crypt.restype = ctypes.c_char_p
    answer: bytes = crypt(password.encode(), b"$6$clusterctl")
    return answer.decode()
