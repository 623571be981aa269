"""What `ssh -v` said of a login that failed, as an error with what was tried and a remedy."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from clusterctl.errors import AuthError, ConnectError, HostKeyError, NodeError

if TYPE_CHECKING:
    from collections.abc import Iterable

_METHOD = re.compile(r"^debug1: Next authentication method: (\S+)")
_KEY = re.compile(r"^debug1: (?:Offering public key|Trying private key): (\S+)(?: (\S+) SHA256:\S+)?")
_OFFERS = re.compile(r"^debug1: Authentications that can continue: (\S+)")
_DEBUG = re.compile(r"^(debug[123]: |OpenSSH_|Warning: Permanently added )")
_OUTER = re.compile("UNKNOWN port|^kex_exchange_identification: ")
"""What `ssh` says of a connection that its jump host closed, after that host's own `ssh` has said why."""
_QUOTED = 300


def failure(node: str, log: str, address: str) -> NodeError:
    """Return the error for a login that `ssh` could not do.

    Args:
        node: For the message.
        log: What `ssh -v` wrote.
        address: What `ssh` is given to get there by hand.
    """
    lines = [line.strip("\r") for line in log.split("\n")]
    lines_said = [" ".join(line.split()) for line in lines if line.strip() and not _DEBUG.match(line)]
    own = [line for line in lines_said if not _OUTER.search(line)] or lines_said
    last = (own[-1] if own else "it gave no reason")[-_QUOTED:]
    if "Host key verification failed" in last:
        return _untrusted(node, lines_said, address, "its host key" if own == lines_said else "the key of a jump host")
    if "Permission denied" in last or "Too many authentication failures" in log:
        return _refused(node, lines, last, address)
    text = re.sub(r"^ssh: (connect to host \S+ port \d+: )?", "", last)
    return ConnectError(node, f"`ssh` cannot connect: {text}", hint=f"`ssh -v {address} true` shows more")


def _untrusted(node: str, said: Iterable[str], address: str, key: str) -> HostKeyError:
    text = " ".join(said)
    if "HOST IDENTIFICATION HAS CHANGED" in text:
        hint = "someone may be in between; if the machine was reinstalled, `ssh-keygen -R` its name, then connect again"
        return HostKeyError(node, f"`ssh` says that {key} has changed", hint=hint)
    if "is not a listed principal" in text or "Certificate invalid" in text:
        reason = re.search(r"(Certificate invalid: [^.\n]*?)(?= No | Host key|$)", text)
        shown = reason[1] if reason else "it is not for this host"
        hint = "have the authority sign it again, for the name that ssh_config has for the host"
        return HostKeyError(node, f"`ssh` does not accept the certificate of {key}: {shown}", hint=hint)
    hint = f"compare the key that `ssh {address}` shows with the machine's own, then accept it by `clusterctl trust`"
    return HostKeyError(node, f"`ssh` does not know {key}", hint=hint)


def _refused(node: str, lines: Iterable[str], last: str, address: str) -> AuthError:
    tried: dict[str, list[str]] = {}
    offers: tuple[str, ...] = ()
    for line in lines:
        if match := _METHOD.match(line):
            tried.setdefault(match[1], [])
        elif match := _KEY.match(line):
            tried.setdefault("publickey", []).append(f"{match[1]} ({match[2]})" if match[2] else match[1])
        elif match := _OFFERS.match(line):
            offers = tuple(match[1].split(","))
    shown = ", ".join(f"{name} {' and '.join(keys)}" if keys else name for name, keys in tried.items()) or "nothing"
    takes = ", ".join(offers) or "nothing more"
    text = f"`ssh` could not log in (tried: {shown}; sshd takes: {takes})"
    if "Too many" in last:
        text = f"`ssh` could not log in: sshd hung up after too many keys (tried: {shown})"
    return AuthError(node, text, hint=_remedy(offers, tried, address))


def _remedy(offers: tuple[str, ...], tried: dict[str, list[str]], address: str) -> str:
    if {"keyboard-interactive", "password"} & set(offers):
        return (
            "it asks for something: `clusterctl trust --login` lets `ssh` ask once, at a terminal; "
            "or answer by SSH_ASKPASS with SSH_ASKPASS_REQUIRE=force"
        )
    if "gssapi-with-mic" in offers:
        remedy = "get a ticket with `kinit`"
        return remedy if "gssapi-with-mic" in tried else f"{remedy}, and set `GSSAPIAuthentication yes` in ssh_config"
    return f"`ssh -v {address} true` shows the same; add a key to the machine: `ssh-copy-id {address}`"
