"""Why a login by the built-in client failed: what was tried, the likeliest reason, and its remedy."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.errors import AuthError
from clusterctl.transport.ssh.auth import ENCRYPTED, HARDWARE, UNSUPPORTED

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass
class Tried:
    """What came of trying to log in.

    Attributes:
        unusable: Files to why their key could not be used.
        refused: Names of the keys that were turned down, in order.
        methods: What the server allows in place of what was tried.
        wants_more: What the server asks for beyond a key that it accepted.
        lost: The server hung up without an answer to the last offer.
        closed: The server hung up.
        sha1_only: The server cannot check RSA signatures other than with SHA-1.
        agent: Why an ssh-agent was of no help, or `None`.
        missing: Keys that somebody named and that are not there.
        address: What ssh would have to be given to come here, `-p PORT` included; "" where the node's name does.
    """

    user: str
    unusable: dict[str, str] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    methods: tuple[str, ...] = ()
    wants_more: tuple[str, ...] = ()
    lost: bool = False
    closed: bool = False
    sha1_only: bool = False
    agent: str | None = None
    missing: tuple[str, ...] = ()
    address: str = ""


class LoginRefusal(AuthError):  # noqa: N818 - it is one, with what is needed to act on it
    """A login that failed, with what came of each attempt."""

    def __init__(self, node: str, message: str, *, hint: str, tried: Tried) -> None:
        super().__init__(node, message, hint=hint)
        self.tried = tried


def failure(node: str, tried: Tried) -> AuthError:
    """Return the error for a login that failed: the likeliest reason and its remedy."""
    text, hint = _reason(node, tried)
    gone = next((path for path in tried.missing if path not in text), None)
    if gone is not None:
        # ssh, too, passes it over without an error, and then it is the last thing that one thinks of.
        hint = f"{gone} does not exist: name another by `identity_file:`; or {hint}"
    return LoginRefusal(node, f"{text}, and {tried.agent}" if tried.agent else text, hint=hint, tried=tried)


def _reason(node: str, tried: Tried) -> tuple[str, str]:
    encrypted = [path for path, reason in tried.unusable.items() if reason == ENCRYPTED]
    if tried.wants_more and "publickey" not in tried.wants_more:
        text = f"accepted the key, but also asks for {' or '.join(tried.wants_more)} (two factors)"
        alone = "(`Match` with `AuthenticationMethods publickey`)"
        return (
            text,
            f"type what it asks for once, by `clusterctl trust --login`; or let sshd accept a key alone {alone}",
        )
    if tried.methods and "publickey" not in tried.methods:
        text = f"sshd allows no login by key, only by {' or '.join(tried.methods)}"
        once = "type what it asks for once, by `clusterctl trust --login`"
        return text, f"{once}; or set `PubkeyAuthentication yes` in its sshd_config and add your public key"
    if encrypted:
        text = f"the key {encrypted[0]} {ENCRYPTED} and no ssh-agent holds it"
        return text, f"run `ssh-add {encrypted[0]}`"
    if tried.sha1_only and tried.refused:
        hint = "log in with an ed25519 key, or update its sshd"
        return "its sshd is too old to accept RSA keys other than with SHA-1", hint
    if tried.closed and tried.refused:
        hint = "name the right one by `identity_file:`, with `IdentitiesOnly yes` in ~/.ssh/config"
        offered = "1 key was" if len(tried.refused) == 1 else f"{len(tried.refused)} keys were"
        return f"sshd hung up after {offered} offered", hint
    if tried.refused:
        takes = f"; sshd takes: {', '.join(tried.methods)}" if tried.methods else ""
        text = f"no key was accepted for user `{tried.user}` (offered: {', '.join(tried.refused)}{takes})"
        to = tried.address or f"{tried.user}@{node}"
        return text, f"add one to the machine: `ssh-copy-id {_named(tried.refused)}{to}`"
    if tried.unusable:
        path, reason = next(iter(tried.unusable.items()))
        if reason in (HARDWARE, UNSUPPORTED):
            return f"the key {path} {reason}", "set `client: openssh` below `ssh:`, or name another by `identity_file:`"
        return f"the key {path} {reason}", "name another by `identity_file:`"
    if tried.missing:
        return f"the key {tried.missing[0]} does not exist", "name another by `identity_file:`"
    text = f"there is no key to log in with as user `{tried.user}`"
    return text, "make one with `ssh-keygen`, load one with `ssh-add`, or name yours by `identity_file:`"


_DEFAULT = re.compile(r"id_(rsa|dsa|ecdsa|ecdsa_sk|ed25519|ed25519_sk|xmss)")


def _named(keys: Sequence[str]) -> str:
    """Return how `ssh-copy-id` is told which key, where all that were offered are files that it does not think of."""
    others = [key for key in keys if os.path.isabs(key) and not _DEFAULT.fullmatch(Path(key).name)]
    return f"-i {shlex.quote(others[0])} " if others and len(others) == len(keys) else ""


def missing(files: Sequence[str], named: str | None = None) -> tuple[str, ...]:
    """Return the keys that somebody named and that are not there: not those that ssh tries unasked.

    Args:
        files: What ssh would try.
        named: The key of the cluster file, which is meant whatever it is called.
    """
    meant = [named] if named is not None else []
    meant += [path for path in files if path != named and not _DEFAULT.fullmatch(Path(path).name)]
    return tuple(path for path in meant if not os.path.exists(path))
