"""What the built-in client cannot do and the user's own `ssh` may: decided from how a login failed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.errors import ConnectError, NodeError
from clusterctl.transport.ssh.auth import ENCRYPTED
from clusterctl.transport.ssh.host_keys import HostKeyRefusal
from clusterctl.transport.ssh.known_hosts import Verdict
from clusterctl.transport.ssh.refused import LoginRefusal

if TYPE_CHECKING:
    from clusterctl.transport.ssh.config import SshOptions
    from clusterctl.transport.ssh.refused import Tried

_TYPED = ("keyboard-interactive", "password")


class NoCommonAlgorithmError(ConnectError):
    """Client and server have no algorithm in common."""


def beyond(error: NodeError, options: SshOptions, *, answers: bool, shared: bool) -> str | None:
    """Return what stands between the built-in client and a host, in words; `None` where `ssh` could do no more.

    Args:
        error: How the login failed.
        options: What ssh_config says of the host.
        answers: Whether a program answers the questions of `ssh` (SSH_ASKPASS).
        shared: Whether a connection is open already that `ssh` would share.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, HostKeyRefusal):
            return _trust(cause.verdict, options)
        if isinstance(cause, LoginRefusal):
            return _login(cause.tried, options, answers=answers, shared=shared)
        if isinstance(cause, NoCommonAlgorithmError):
            return "speak an algorithm that the server asks for"
        cause = cause.__cause__
    way = next((key for key in ("bindinterface", "proxyusefdpass") if options.other(key)), None)
    return "follow `BindInterface` or `ProxyUseFdpass` of ssh_config" if way else None


def _trust(verdict: Verdict, options: SshOptions) -> str | None:
    if verdict is Verdict.AUTHORITY:
        return "check a host certificate (@cert-authority)"
    if verdict is Verdict.UNKNOWN and options.other("knownhostscommand"):
        return "ask the `KnownHostsCommand` of ssh_config"
    if verdict is Verdict.UNKNOWN and options.other("verifyhostkeydns"):
        return "look host keys up in the DNS (`VerifyHostKeyDNS`)"
    return None


def _login(tried: Tried, options: SshOptions, *, answers: bool, shared: bool) -> str | None:
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
    if answers and (offered & set(_TYPED) or tried.unusable):
        return "answer questions (SSH_ASKPASS does)"
    return None
