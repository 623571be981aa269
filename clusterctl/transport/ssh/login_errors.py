"""Explains failed logins: the likeliest reason, the remedy, and whether the `ssh` program could log in."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clusterctl.errors import AuthError, ConnectError, HostKeyError, NodeError
from clusterctl.transport.ssh.host_keys import UntrustedKeyError
from clusterctl.transport.ssh.known_hosts import HostKeyVerdict
from clusterctl.transport.ssh.login_keys import ENCRYPTED, HARDWARE, UNSUPPORTED
from clusterctl.transport.ssh.ssh_options import SshOptions


@dataclass
class LoginAttempt:
    """The results of the attempts of one login.

    Attributes:
        user: Name of the user on the node.
        unusable: Path of each unusable key file to the reason.
        refused: Names of the rejected keys, in order.
        methods: Login methods that the server allows.
        further_methods: Methods that the server asks for after accepting a key.
        lost: The server closed the connection without an answer to the last offer.
        closed: The server closed the connection.
        sha1_only: The server can verify RSA signatures with SHA-1 only.
        agent: The error of the ssh-agent, or `None`.
        missing: Paths of configured keys that do not exist.
        address: The arguments of ssh for this host, with `-p PORT`; "" if ssh knows the name of the node.
    """

    user: str
    unusable: dict[str, str] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    methods: tuple[str, ...] = ()
    further_methods: tuple[str, ...] = ()
    lost: bool = False
    closed: bool = False
    sha1_only: bool = False
    agent: str | None = None
    missing: tuple[str, ...] = ()
    address: str = ""


class LoginRefusedError(AuthError):
    """A login failed; `tried` contains the results of its attempts."""

    def __init__(self, node: str, message: str, *, hint: str, tried: LoginAttempt) -> None:
        super().__init__(node, message, hint=hint)
        self.tried = tried


def explain_login_failure(node: str, tried: LoginAttempt) -> AuthError:
    """Return the error for a failed login, with the likeliest reason and the remedy."""
    text, hint = _reason(node, tried)
    gone = next((path for path in tried.missing if path not in text), None)
    if gone is not None:
        # `ssh` also ignores a missing key without an error, so the user may not know.
        hint = f"{gone} does not exist: set another `identity_file:`; or {hint}"
    return LoginRefusedError(node, f"{text}, and {tried.agent}" if tried.agent else text, hint=hint, tried=tried)


def _reason(node: str, tried: LoginAttempt) -> tuple[str, str]:
    encrypted = [path for path, reason in tried.unusable.items() if reason == ENCRYPTED]
    if tried.further_methods and "publickey" not in tried.further_methods:
        text = f"sshd accepted the key, but also asks for {' or '.join(tried.further_methods)} (two factors)"
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
        hint = "set the right key by `identity_file:`, with `IdentitiesOnly yes` in ~/.ssh/config"
        offered = "1 key was" if len(tried.refused) == 1 else f"{len(tried.refused)} keys were"
        return f"sshd closed the connection after {offered} offered", hint
    if tried.refused:
        takes = f"; sshd takes: {', '.join(tried.methods)}" if tried.methods else ""
        text = f"no key was accepted for user `{tried.user}` (offered: {', '.join(tried.refused)}{takes})"
        to = tried.address or f"{tried.user}@{node}"
        # `ssh-copy-id` finds keys with default names itself.
        others = [key for key in tried.refused if os.path.isabs(key) and not _DEFAULT_KEY.fullmatch(Path(key).name)]
        named = f"-i {shlex.quote(others[0])} " if others and len(others) == len(tried.refused) else ""
        return text, f"add one to the machine: `ssh-copy-id {named}{to}`"
    if tried.unusable:
        path, reason = next(iter(tried.unusable.items()))
        if reason in (HARDWARE, UNSUPPORTED):
            return f"the key {path} {reason}", "set `client: openssh` below `ssh:`, or set another `identity_file:`"
        return f"the key {path} {reason}", "set another `identity_file:`"
    if tried.missing:
        return f"the key {tried.missing[0]} does not exist", "set another `identity_file:`"
    text = f"there is no key to log in with as user `{tried.user}`"
    return text, "make one with `ssh-keygen`, load one with `ssh-add`, or name yours by `identity_file:`"


_DEFAULT_KEY = re.compile(r"id_(rsa|dsa|ecdsa|ecdsa_sk|ed25519|ed25519_sk|xmss)")


def list_missing_keys(files: Sequence[str], named: str | None = None) -> tuple[str, ...]:
    """Return the configured keys that do not exist, except default names such as `id_rsa`.

    Args:
        files: Paths of the keys that ssh would try.
        named: The key in the cluster file. If this key is missing, it is returned even if it has a default name.
    """
    meant = [named] if named is not None else []
    meant += [path for path in files if path != named and not _DEFAULT_KEY.fullmatch(Path(path).name)]
    return tuple(path for path in meant if not os.path.exists(path))


_METHOD = re.compile(r"^debug1: Next authentication method: (\S+)")
_KEY = re.compile(r"^debug1: (?:Offering public key|Trying private key): (\S+)(?: (\S+) SHA256:\S+)?")
_OFFERS = re.compile(r"^debug1: Authentications that can continue: (\S+)")
_DEBUG = re.compile(r"^(debug[123]: |OpenSSH_|Warning: Permanently added )")
_OUTER = re.compile("UNKNOWN port|^kex_exchange_identification: ")
"""Messages of `ssh` about a failed jump host. Before such a message, the `ssh` for the jump host has printed the
reason."""
_QUOTED_TEXT = 300


def explain_ssh_log(node: str, log: str, address: str) -> NodeError:
    """Return the error for a failed login of the `ssh` program.

    Args:
        node: Name of the node, for the message.
        log: Output of `ssh -v`.
        address: The arguments of `ssh` for this host.
    """
    lines = [line.strip("\r") for line in log.split("\n")]
    lines_said = [" ".join(line.split()) for line in lines if line.strip() and not _DEBUG.match(line)]
    own = [line for line in lines_said if not _OUTER.search(line)] or lines_said
    last = (own[-1] if own else "it gave no reason")[-_QUOTED_TEXT:]
    if "Host key verification failed" in last:
        return _explain_host_key(
            node, lines_said, address, "its host key" if own == lines_said else "the key of a jump host"
        )
    if "Permission denied" in last or "Too many authentication failures" in log:
        return _explain_refusal(node, lines, last, address)
    text = re.sub(r"^ssh: (connect to host \S+ port \d+: )?", "", last)
    return ConnectError(node, f"`ssh` cannot connect: {text}", hint=f"`ssh -v {address} true` shows more")


def _explain_host_key(node: str, said: Iterable[str], address: str, key: str) -> HostKeyError:
    text = " ".join(said)
    if "HOST IDENTIFICATION HAS CHANGED" in text:
        hint = "an attacker may intercept the connection; if the machine was reinstalled: `ssh-keygen -R` its name"
        return HostKeyError(node, f"`ssh` says that {key} has changed", hint=hint)
    if "is not a listed principal" in text or "Certificate invalid" in text:
        reason = re.search(r"(Certificate invalid: [^.\n]*?)(?= No | Host key|$)", text)
        shown = reason[1] if reason else "it is not for this host"
        hint = (
            "ask the certificate authority to sign the host key again, for the name by which `ssh` reaches the host "
            "(HostKeyAlias, or else Hostname of ssh_config)"
        )
        return HostKeyError(node, f"`ssh` does not accept the certificate of {key}: {shown}", hint=hint)
    hint = f"compare the key that `ssh {address}` shows with the machine's key, then accept it with `clusterctl trust`"
    return HostKeyError(node, f"`ssh` does not know {key}", hint=hint)


def _explain_refusal(node: str, lines: Iterable[str], last: str, address: str) -> AuthError:
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
        text = f"`ssh` could not log in: sshd closed the connection after too many keys (tried: {shown})"
    return AuthError(node, text, hint=_remedy(offers, tried, address))


def _remedy(offers: tuple[str, ...], tried: dict[str, list[str]], address: str) -> str:
    if {"keyboard-interactive", "password"} & set(offers):
        return (
            "sshd asks a question: answer it once at a terminal with `clusterctl trust --login`, or by a program "
            "(SSH_ASKPASS with SSH_ASKPASS_REQUIRE=force)"
        )
    if "gssapi-with-mic" in offers:
        remedy = "get a ticket with `kinit`"
        return remedy if "gssapi-with-mic" in tried else f"{remedy}, and set `GSSAPIAuthentication yes` in ssh_config"
    return f"add a key to the machine: `ssh-copy-id {address}`; `ssh -v {address} true` shows details"


_INTERACTIVE_METHODS = ("keyboard-interactive", "password")


class NoCommonAlgorithmError(ConnectError):
    """The built-in client and the server have no common algorithm."""


def find_fallback_reason(error: NodeError, options: SshOptions, *, answers: bool, shared: bool) -> str | None:
    """Return what the built-in client cannot do but `ssh` may do for this host; `None` if `ssh` would fail too.

    Args:
        error: The error of the built-in client.
        options: ssh_config of the host.
        answers: A program answers the questions of `ssh` (SSH_ASKPASS).
        shared: An open connection exists that `ssh` would share.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, UntrustedKeyError):
            return _why_for_host_key(cause.presented.verdict, options)
        if isinstance(cause, LoginRefusedError):
            return _why_for_login(cause.tried, options, answers=answers, shared=shared)
        if isinstance(cause, NoCommonAlgorithmError):
            return "speak an algorithm that the server asks for"
        cause = cause.__cause__
    way = next((key for key in ("bindinterface", "proxyusefdpass") if options.get_openssh_only(key)), None)
    return "follow `BindInterface` or `ProxyUseFdpass` of ssh_config" if way else None


def _why_for_host_key(verdict: HostKeyVerdict, options: SshOptions) -> str | None:
    if verdict is HostKeyVerdict.AUTHORITY:
        return "check a host certificate (@cert-authority)"
    if verdict is HostKeyVerdict.UNKNOWN and options.get_openssh_only("knownhostscommand"):
        return "ask the `KnownHostsCommand` of ssh_config"
    if verdict is HostKeyVerdict.UNKNOWN and options.get_openssh_only("verifyhostkeydns"):
        return "look host keys up in the DNS (`VerifyHostKeyDNS`)"
    return None


def _why_for_login(tried: LoginAttempt, options: SshOptions, *, answers: bool, shared: bool) -> str | None:
    offered = {*tried.methods, *tried.further_methods}
    if shared:
        return "share the connection that is open already (ControlPath)"
    if any(reason != ENCRYPTED for reason in tried.unusable.values()):
        return "use a key of this type"
    if options.get_openssh_only("pkcs11provider"):
        return "use keys of a smart card (PKCS11Provider)"
    if "gssapi-with-mic" in offered and options.get_openssh_only("gssapiauthentication"):
        return "log in by GSSAPI (Kerberos)"
    if "hostbased" in offered and options.get_openssh_only("hostbasedauthentication"):
        return "log in by the key of this machine (HostbasedAuthentication)"
    if answers and (offered & set(_INTERACTIVE_METHODS) or tried.unusable):
        return "answer questions (SSH_ASKPASS does)"
    return None
