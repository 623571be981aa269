"""Whose word counts about a host key: ssh_config's, and a cluster file's only where it is stricter."""

from __future__ import annotations

import base64
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import paramiko
import pytest

from clusterctl.config.spec import HostSpec, SshSpec
from clusterctl.errors import HostKeyError, NodeError
from clusterctl.transport.ssh.host_keys import (
    HostKeyChecker,
    UntrustedKeyError,
    add_to_known_hosts,
    explain_untrusted_key,
    fetch_host_keys,
)
from clusterctl.transport.ssh.known_hosts import HostKey, HostKeyVerdict
from clusterctl.transport.ssh.paramiko_transport import SshTransport
from clusterctl.transport.ssh.ssh_options import Destination
from clusterctl.transport.ssh.underlying_stream import PreDialer
from tests.lab.waiting import wait_for
from tests.unit.transport.hostile import HostileServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Check = Callable[..., str | None]

BLOBS = [paramiko.ECDSAKey.generate() for _ in range(2)]
KEY, OTHER = (HostKey(key.get_name(), key.asbytes()) for key in BLOBS)
GPU01 = Destination(host="gpu01", address="10.0.0.1")


def public(key: HostKey) -> str:
    return f"{key.type} {base64.b64encode(key.blob).decode()}"


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """Checks the key that a host shows, with an ssh_config and what a cluster file says."""

    def make(
        config: str, key: HostKey = KEY, *, destination: Destination = GPU01, files: str = "known", **spec: object
    ) -> str | None:
        path = tmp_path / "ssh_config"
        path.write_text(f"{config}\nUserKnownHostsFile {files if files.startswith('/') else tmp_path / files}\n")
        predialer = PreDialer(str(path))
        keys = HostKeyChecker(SshSpec(**spec), predialer.list_user_known_hosts)  # type: ignore[arg-type]
        return keys.check("n", destination, predialer.resolve_options("n", destination), key)

    return make


def refused(check: Check, config: str, **spec: object) -> UntrustedKeyError | None:
    try:
        check(config, **spec)
    except UntrustedKeyError as error:
        return error
    return None


ACCEPTS = ("no", "accept-new")


@pytest.mark.parametrize("of_file", [None, "strict", "accept-new"])
@pytest.mark.parametrize("of_user", ["yes", "ask", "accept-new", "no"])
def test_the_stricter_of_cluster_file_and_ssh_config_holds(
    check: Check, tmp_path: Path, of_user: str, of_file: str | None
) -> None:
    accepted = (of_user in ACCEPTS and of_file != "strict") or (of_user == "ask" and of_file == "accept-new")
    error = refused(check, f"StrictHostKeyChecking {of_user}", host_keys=of_file)
    assert (error is None) is accepted
    loosened = "overrides `host_keys: accept-new`" in str(error and error.hint)
    assert loosened is (of_user == "yes" and of_file == "accept-new")
    assert accepted or "clusterctl trust" in str(error and error.hint)
    assert (tmp_path / "known").exists() is accepted


@pytest.mark.parametrize("policy", ["no", "accept-new"])
@pytest.mark.parametrize("nowhere", ["/dev/null", "none"])
def test_a_user_who_keeps_no_keys_is_told_so_and_connects(check: Check, policy: str, nowhere: str) -> None:
    files = "/dev/null" if nowhere == "/dev/null" else "/dev/null\nUserKnownHostsFile none"
    assert "stores no host keys" in (check(f"StrictHostKeyChecking {policy}", files=files) or "")


def test_a_file_does_not_choose_for_one_who_keeps_no_keys(check: Check) -> None:
    with pytest.raises(HostKeyError, match="is not stored: /dev/null is not a regular file") as caught:
        check("", files="/dev/null", host_keys="accept-new")
    assert "UserKnownHostsFile" in (caught.value.hint or "")


def test_known_hosts_of_a_file_are_read_beside_the_users_own_and_never_written(check: Check, tmp_path: Path) -> None:
    of_file = tmp_path / "of_file"
    of_file.write_text(f"10.0.0.1 {public(KEY)}\n")
    before = of_file.read_text()
    assert check("StrictHostKeyChecking yes", known_hosts=(str(of_file),)) is None
    with pytest.raises(UntrustedKeyError) as changed:
        check("StrictHostKeyChecking accept-new", OTHER, known_hosts=(str(of_file),))
    assert changed.value.presented.verdict is HostKeyVerdict.CHANGED
    elsewhere = Destination(host="gpu02")
    assert check("StrictHostKeyChecking accept-new", destination=elsewhere, known_hosts=(str(of_file),)) is None
    assert of_file.read_text() == before
    assert (tmp_path / "known").read_text() == f"gpu02 {public(KEY)}\n"


def test_known_hosts_of_a_file_change_nothing_about_a_host_that_the_user_knows(check: Check, tmp_path: Path) -> None:
    (tmp_path / "known").write_text(f"10.0.0.1 {public(OTHER)}\n")
    (tmp_path / "of_file").write_text(f"10.0.0.1 {public(KEY)}\n")
    with pytest.raises(UntrustedKeyError, match=f"changed.*{tmp_path}/known:1 has another key"):
        check("", known_hosts=(str(tmp_path / "of_file"),))


def test_known_hosts_of_a_file_may_revoke_what_the_user_trusts(check: Check, tmp_path: Path) -> None:
    (tmp_path / "known").write_text(f"10.0.0.1 {public(KEY)}\n")
    (tmp_path / "of_file").write_text(f"@revoked * {public(KEY)}\n")
    with pytest.raises(UntrustedKeyError, match="marked @revoked"):
        check("", known_hosts=(str(tmp_path / "of_file"),))


def test_the_file_that_is_written_is_not_chosen_by_an_address(check: Check, tmp_path: Path) -> None:
    check("StrictHostKeyChecking accept-new", files="keys-%h")
    assert not (tmp_path / "keys-10.0.0.1").exists()
    assert (tmp_path / "keys-gpu01").read_text() == f"10.0.0.1 {public(KEY)}\n"


@pytest.mark.parametrize("kind", ["list", "krl"])
def test_a_revoked_key_is_refused_however_well_it_is_known(check: Check, tmp_path: Path, kind: str) -> None:
    (tmp_path / "known").write_text(f"10.0.0.1 {public(KEY)}\n10.0.0.1 {public(OTHER)}\n")
    revoked = tmp_path / "revoked"
    (tmp_path / "key.pub").write_text(f"# taken back\n{public(KEY)} a comment\n")
    if kind == "krl":
        subprocess.run(["ssh-keygen", "-q", "-k", "-f", revoked, tmp_path / "key.pub"], check=True)
    else:
        revoked.write_text((tmp_path / "key.pub").read_text())
    with pytest.raises(UntrustedKeyError, match=f"is revoked by {revoked}") as caught:
        check(f"RevokedHostKeys {revoked}")
    assert caught.value.presented.verdict is HostKeyVerdict.REVOKED
    assert check(f"RevokedHostKeys {revoked}", OTHER) is None


@pytest.mark.parametrize("content", [None, "nonsense\n", "SSHKRL\n\0 torn"], ids=["missing", "no-keys", "torn-krl"])
def test_no_host_is_trusted_while_the_list_of_revoked_keys_cannot_be_read(
    check: Check, tmp_path: Path, content: str | None
) -> None:
    (tmp_path / "known").write_text(f"10.0.0.1 {public(KEY)}\n")
    if content is not None:
        (tmp_path / "revoked").write_text(content)
    with pytest.raises(HostKeyError, match="the revoked host keys in .* cannot be read") as caught:
        check(f"RevokedHostKeys {tmp_path}/revoked")
    assert "RevokedHostKeys" in (caught.value.hint or "")


# --- against a hostile server


@pytest.fixture(scope="module")
def server() -> Iterator[HostileServer]:
    with HostileServer() as started:
        yield started


@pytest.fixture
def transport(tmp_path: Path) -> Iterator[Callable[..., SshTransport]]:
    made = []

    def make(config: str, **spec: object) -> SshTransport:
        (tmp_path / "ssh_config").write_text(f"IdentityAgent none\nIdentityFile none\n{config}\n")
        made.append(SshTransport(SshSpec(**spec), config_file=str(tmp_path / "ssh_config")))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for transport in made:
        transport.close()


# The library's own threads on the server's side may end with an exception, as their connection is closed under them.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("name", ["pty", "restrict", "user-rc"])
def test_a_hostile_file_and_server_get_no_key_into_a_file_of_logins(
    tmp_path: Path, server: HostileServer, transport: Callable[..., SshTransport], name: str
) -> None:
    logins = tmp_path / "authorized_keys"
    logins.write_text(f"{public(OTHER)} me@home\n")
    host = HostSpec(name="gpu01", host="gpu01", address=name, user="x", proxy_jump=f"127.0.0.1:{server.port}")
    known = tmp_path / "known_hosts"
    hostile = transport(f"UserKnownHostsFile {known}", host_keys="accept-new", known_hosts=(str(logins),))
    try:
        hostile.open(host).close()
    except NodeError:
        pass  # what it is after is the key that was filed by then
    assert logins.read_text() == f"{public(OTHER)} me@home\n"
    assert known.read_text().splitlines()[-1].split()[0] == name

    careless = transport(f"UserKnownHostsFile {logins}", host_keys="accept-new")
    with pytest.raises(HostKeyError, match="is not a line of a known_hosts file"):
        careless.open(host)
    found, _ = fetch_host_keys(careless, [HostSpec(name="gate", host="127.0.0.1", port=server.port)])
    with pytest.raises(HostKeyError, match="is not a line of a known_hosts file"):
        add_to_known_hosts(found)
    assert logins.read_text() == f"{public(OTHER)} me@home\n"


def test_the_remedy_for_a_changed_key_names_the_file_that_holds_the_old_one(
    tmp_path: Path, server: HostileServer, transport: Callable[..., SshTransport]
) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-N", "", "-f", tmp_path / "old"], check=True)
    other.write_text(f"[127.0.0.1]:{server.port} {(tmp_path / 'old.pub').read_text()}")
    config = f"UserKnownHostsFile {own} {other}"

    (found,), _ = fetch_host_keys(transport(config), [HostSpec(name="gate", host="127.0.0.1", port=server.port)])

    assert found.verdict is HostKeyVerdict.CHANGED
    assert f"`ssh-keygen -R '[127.0.0.1]:{server.port}' -f {other}`" in (explain_untrusted_key(found).hint or "")


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("Ciphers", "chacha20-poly1305@openssh.com", "`Ciphers` of ssh_config allows no algorithm"),
        ("MACs", "umac-128@openssh.com", "`MACs` of ssh_config allows no algorithm"),
        ("KexAlgorithms", "sntrup761x25519-sha512@openssh.com", "`KexAlgorithms` of ssh_config allows no algorithm"),
        ("HostKeyAlgorithms", "ssh-ed25519", "offers no host key of a type that is still accepted"),
    ],
)
def test_an_algorithm_that_ssh_config_leaves_out_is_not_used(
    tmp_path: Path,
    server: HostileServer,
    transport: Callable[..., SshTransport],
    option: str,
    value: str,
    words: str,
) -> None:
    host = HostSpec(name="n", host="127.0.0.1", port=server.port)
    with pytest.raises(NodeError, match=words):
        transport(f"{option} {value}\nUserKnownHostsFile {tmp_path}/known").fetch_host_key(host)


def test_lists_of_algorithms_that_leave_something_are_kept_to(
    tmp_path: Path, server: HostileServer, transport: Callable[..., SshTransport]
) -> None:
    lists = "Ciphers aes256-ctr\nMACs hmac-sha2-512\nKexAlgorithms curve25519-sha256\nHostKeyAlgorithms ecdsa-sha2-*\n"
    host = HostSpec(name="n", host="127.0.0.1", port=server.port)
    before = len(server.seen)
    assert transport(f"{lists}UserKnownHostsFile {tmp_path}/known").fetch_host_key(host).key == server.fetch_host_key
    # Threads of the server may still be at work on connections of other tests.
    wait_for(lambda: ("aes256-ctr", "hmac-sha2-512") in server.seen[before:], what="a connection with just these")
