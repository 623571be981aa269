"""When a login that failed is worth another try by the user's own `ssh`, and what is said where that fails too."""

from __future__ import annotations

import pytest

from clusterctl.errors import AuthError, ConnectError, HostKeyError, NodeError
from clusterctl.transport.ssh.host_keys import PresentedKey, UntrustedKeyError
from clusterctl.transport.ssh.known_hosts import HostKey, HostKeyVerdict
from clusterctl.transport.ssh.login_errors import (
    LoginAttempt,
    NoCommonAlgorithmError,
    explain_login_failure,
    find_fallback_reason,
)
from clusterctl.transport.ssh.login_errors import explain_ssh_log as failure_of_ssh
from clusterctl.transport.ssh.login_keys import ENCRYPTED, HARDWARE
from clusterctl.transport.ssh.ssh_options import SshOptions


def untrusted(verdict: HostKeyVerdict) -> UntrustedKeyError:
    key = HostKey("ssh-ed25519", b"x")
    return UntrustedKeyError(PresentedKey(("n",), "n", key, verdict, None, "/k", hashed=False), "no", hint="")


def refused(**tried: object) -> AuthError:
    return explain_login_failure("n", LoginAttempt("u", **tried))  # type: ignore[arg-type]


def behind_a_jump(error: NodeError) -> NodeError:
    outer = AuthError("n", f"jump host `gate`: {error}")
    outer.__cause__ = error
    return outer


KEYS = ("publickey",)


@pytest.mark.parametrize(
    ("error", "options", "reason"),
    [
        pytest.param(untrusted(HostKeyVerdict.AUTHORITY), {}, "check a host certificate", id="certificate"),
        pytest.param(untrusted(HostKeyVerdict.UNKNOWN), {}, None, id="unknown"),
        pytest.param(
            untrusted(HostKeyVerdict.UNKNOWN), {"knownhostscommand": "/x"}, "KnownHostsCommand", id="known-command"
        ),
        pytest.param(untrusted(HostKeyVerdict.CHANGED), {"knownhostscommand": "/x"}, None, id="changed"),
        pytest.param(untrusted(HostKeyVerdict.REVOKED), {"verifyhostkeydns": "yes"}, None, id="revoked"),
        pytest.param(refused(refused=["k"], methods=KEYS), {"gssapiauthentication": "yes"}, None, id="no-more-methods"),
        pytest.param(refused(methods=("gssapi-with-mic",)), {"gssapiauthentication": "yes"}, "by GSSAPI", id="gssapi"),
        pytest.param(refused(methods=("gssapi-with-mic",)), {"gssapiauthentication": "no"}, None, id="gssapi-off"),
        pytest.param(
            refused(further_methods=("hostbased",)),
            {"hostbasedauthentication": "yes"},
            "key of this machine",
            id="hostbased",
        ),
        pytest.param(refused(unusable={"/k": HARDWARE}), {}, "a key of this type", id="fido"),
        pytest.param(behind_a_jump(refused(unusable={"/k": HARDWARE})), {}, "a key of this type", id="jump"),
        pytest.param(refused(unusable={"/k": ENCRYPTED}), {}, None, id="passphrase"),
        pytest.param(refused(methods=("password",)), {}, None, id="password"),
        pytest.param(NoCommonAlgorithmError("n", "no"), {}, "speak an algorithm", id="algorithm"),
        pytest.param(ConnectError("n", "no route"), {}, None, id="no-route"),
        pytest.param(ConnectError("n", "no route"), {"bindinterface": "eth1"}, "BindInterface", id="interface"),
    ],
)
def test_ssh_is_tried_where_it_could_do_more(error: NodeError, options: dict[str, str], reason: str | None) -> None:
    asked = SshOptions(hostname="n", port=22, user="u", openssh_only=tuple(options.items()))
    found = find_fallback_reason(error, asked, answers=False, shared=False)
    assert (found is None) == (reason is None)
    assert (reason or "") in (found or "")


def test_who_answers_questions_or_shares_a_connection_makes_a_difference() -> None:
    options = SshOptions(hostname="n", port=22, user="u")
    error = refused(methods=("keyboard-interactive",))
    assert "answer questions" in (find_fallback_reason(error, options, answers=True, shared=False) or "")
    assert "share the connection" in (find_fallback_reason(error, options, answers=False, shared=True) or "")


LOGIN = """OpenSSH_9.2p1 Debian
debug1: Authentications that can continue: publickey,gssapi-with-mic
debug1: Next authentication method: gssapi-with-mic
debug1: No credentials were supplied
debug1: Next authentication method: publickey
debug1: Offering public key: /k ED25519 SHA256:abc explicit
debug1: Authentications that can continue: publickey,gssapi-with-mic
u@n: Permission denied (publickey,gssapi-with-mic).
"""


@pytest.mark.parametrize(
    ("log", "error", "text", "hint"),
    [
        pytest.param(
            LOGIN,
            AuthError,
            "(tried: gssapi-with-mic, publickey /k (ED25519); sshd takes: publickey, gssapi-with-mic)",
            "get a ticket with `kinit`",
            id="login",
        ),
        pytest.param(
            "Certificate invalid: name is not a listed principal\nHost key verification failed.\n",
            HostKeyError,
            "name is not a listed principal",
            "sign the host key again",
            id="principal",
        ),
        pytest.param(
            "ssh: connect to host n port 22: No route to host\n", ConnectError, ": No route to host", "-v", id="route"
        ),
        pytest.param("", ConnectError, "it gave no reason", "ssh -v u@n true", id="silent"),
    ],
)
def test_what_ssh_said_is_one_line_with_a_remedy(log: str, error: type[NodeError], text: str, hint: str) -> None:
    found = failure_of_ssh("n", log, "u@n")
    assert isinstance(found, error)
    assert text in str(found)
    assert hint in (found.hint or "")
    assert "\n" not in str(found) + (found.hint or "")
