"""Decides from a failed login whether the user's `ssh` could do what the built-in client cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.errors import ConnectError, NodeError
from clusterctl.transport.ssh.host_keys import UntrustedKeyError
from clusterctl.transport.ssh.keys import ENCRYPTED
from clusterctl.transport.ssh.known_hosts import HostKeyVerdict
from clusterctl.transport.ssh.login_errors import LoginRefusedError

if TYPE_CHECKING:
    from clusterctl.transport.ssh.config import SshOptions
    from clusterctl.transport.ssh.login_errors import LoginAttempt

_INTERACTIVE_METHODS = ("keyboard-interactive", "password")


class NoCommonAlgorithmError(ConnectError):
    """Client and server have no common algorithm."""


def why_openssh(error: NodeError, options: SshOptions, *, answers: bool, shared: bool) -> str | None:
    """Return why the built-in client cannot reach a host that `ssh` may reach; `None` if `ssh` could do no more.

    Args:
        error: The failure of the login.
        options: ssh_config of the host.
        answers: Whether a program answers the questions of `ssh` (SSH_ASKPASS).
        shared: Whether an open connection exists that `ssh` would share.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, UntrustedKeyError):
            return _why_for_host_key(cause.verdict, options)
        if isinstance(cause, LoginRefusedError):
            return _why_for_login(cause.tried, options, answers=answers, shared=shared)
        if isinstance(cause, NoCommonAlgorithmError):
            return "speak an algorithm that the server asks for"
        cause = cause.__cause__
    way = next((key for key in ("bindinterface", "proxyusefdpass") if options.other(key)), None)
    return "follow `BindInterface` or `ProxyUseFdpass` of ssh_config" if way else None


def _why_for_host_key(verdict: HostKeyVerdict, options: SshOptions) -> str | None:
    if verdict is HostKeyVerdict.AUTHORITY:
        return "check a host certificate (@cert-authority)"
    if verdict is HostKeyVerdict.UNKNOWN and options.other("knownhostscommand"):
        return "ask the `KnownHostsCommand` of ssh_config"
    if verdict is HostKeyVerdict.UNKNOWN and options.other("verifyhostkeydns"):
        return "look host keys up in the DNS (`VerifyHostKeyDNS`)"
    return None


def _why_for_login(tried: LoginAttempt, options: SshOptions, *, answers: bool, shared: bool) -> str | None:
    offered = {*tried.methods, *tried.wants_more}
    if shared:
        return "share the connection that is open already (ControlPath)"
    if any(reason != ENCRYPTED for reason in tried.unusable.values()):
        return "use a key of this type"
    if options.other("pkcs11provider"):
        return "use keys of a smart card (PKCS11Provider)"
    if "gssapi-with-mic" in offered and options.other("gssapiauthentication"):
        return "log in by GSSAPI (Kerberos)"
    if "hostbased" in offered and options.other("hostbasedauthentication"):
        return "log in by the key of this machine (HostbasedAuthentication)"
    if answers and (offered & set(_INTERACTIVE_METHODS) or tried.unusable):
        return "answer questions (SSH_ASKPASS does)"
    return None
