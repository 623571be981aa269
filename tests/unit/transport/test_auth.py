from __future__ import annotations

import base64
import subprocess
from pathlib import Path

import pytest

from clusterctl.transport.ssh.login_errors import LoginAttempt, explain_login_failure, list_missing_keys
from clusterctl.transport.ssh.login_keys import (
    ENCRYPTED,
    HARDWARE,
    AgentIdentity,
    KeyOffer,
    list_key_offers,
    parse_key_type,
    read_public_key,
)


@pytest.fixture
def keys(tmp_path: Path) -> list[str]:
    """Three private keys, the public half beside the first and third, a certificate beside the third."""
    paths = [tmp_path / name for name in ("a", "b", "c")]
    for number, path in enumerate(paths):
        path.write_text("private")
        if number != 1:
            Path(f"{path}.pub").write_text(f"ssh-ed25519 {base64.b64encode(b'blob%d' % number).decode()} x\n")
    Path(f"{paths[2]}-cert.pub").write_text("certificate")
    return [str(path) for path in paths]


HELD = AgentIdentity("ssh-ed25519", b"blob0", "first")
FOREIGN = AgentIdentity("ssh-rsa", b"foreign", "")


def test_offers_come_in_the_order_of_openssh(keys: list[str]) -> None:
    a, b, c = keys
    assert list_key_offers([a, b, c, "/missing"], [], [FOREIGN, HELD], identities_only=False) == [
        KeyOffer(path=c, certificate=f"{c}-cert.pub"),
        KeyOffer(path=a, identity=HELD),
        KeyOffer(identity=FOREIGN),
        KeyOffer(path=b),
        KeyOffer(path=c),
    ]


def test_identities_only_leaves_out_what_no_file_stands_for(keys: list[str]) -> None:
    assert KeyOffer(identity=FOREIGN) not in list_key_offers(keys, [], [FOREIGN, HELD], identities_only=True)


def test_an_encrypted_key_alone_still_tells_its_public_half(tmp_path: Path) -> None:
    path = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", path], check=True)
    public = base64.b64decode(Path(f"{path}.pub").read_text().split()[1])
    Path(f"{path}.pub").unlink()
    assert read_public_key(str(path)) == public
    assert parse_key_type(public) == "ssh-ed25519"


@pytest.mark.parametrize(
    ("tried", "message", "hint"),
    [
        (
            LoginAttempt("u", further_methods=("keyboard-interactive",)),
            "also asks for keyboard-interactive",
            "AuthenticationMet",
        ),
        (
            LoginAttempt("u", refused=["k"], methods=("password",)),
            "no login by key, only by password",
            "PubkeyAuthenticat",
        ),
        (LoginAttempt("u", unusable={"/k": ENCRYPTED}), "/k is protected by a passphrase", "run `ssh-add /k`"),
        (LoginAttempt("u", refused=["k"], closed=True), "closed the connection after 1 key was", "identity_file"),
        (LoginAttempt("u", refused=["k"], sha1_only=True), "too old to accept RSA", "ed25519"),
        (
            LoginAttempt("u", refused=["k", "l"]),
            r"no key was accepted for user `u` \(offered: k, l\)",
            "ssh-copy-id u@n",
        ),
        (
            LoginAttempt("u", refused=["k"], methods=("publickey", "hostbased")),
            "sshd takes: publickey, hostbased",
            "ssh-copy",
        ),
        (LoginAttempt("u", unusable={"/k": HARDWARE}), "/k belongs to a security key", "client: openssh"),
        (LoginAttempt("u", unusable={"/k": "cannot be read: x"}), "/k cannot be read: x", "identity_file"),
        (LoginAttempt("u"), "there is no key to log in with", "ssh-keygen"),
        (LoginAttempt("u", refused=["/my/key"]), "no key was", "`ssh-copy-id -i /my/key u@n`"),
        (LoginAttempt("u", refused=["/root/.ssh/id_rsa", "/my/key"]), "no key was", "`ssh-copy-id u@n`"),
        (
            LoginAttempt("u", refused=["k"], address="-p 22022 u@10.0.0.1"),
            "no key was",
            "`ssh-copy-id -p 22022 u@10.0.0.1`",
        ),
        (LoginAttempt("u", missing=("/nope/id",)), "the key /nope/id does not exist", "identity_file"),
        (LoginAttempt("u", missing=("/nope/id",), refused=["k"]), "no key was accepted", "ssh-copy-id"),
        (
            LoginAttempt("u", missing=("/nope/id",), refused=["k"]),
            "no key was accepted",
            "/nope/id does not exist: set another",
        ),
        (
            LoginAttempt("u", missing=("/nope/id",), unusable={"/k": ENCRYPTED}),
            "/k is protected",
            "/nope/id does not exist",
        ),
        (LoginAttempt("u", agent="the ssh-agent hangs"), "there is no key .*, and the ssh-agent hangs$", "ssh-keygen"),
    ],
)
def test_a_failed_login_is_one_line_with_a_remedy(tried: LoginAttempt, message: str, hint: str) -> None:
    error = explain_login_failure("n", tried)
    with pytest.raises(type(error), match=message):
        raise error
    assert error.hint is not None
    assert hint in error.hint
    assert "\n" not in str(error) + error.hint


def test_a_key_is_missed_only_where_somebody_named_it(tmp_path: Path) -> None:
    there = tmp_path / "mine"
    there.touch()
    files = [str(there), str(tmp_path / "gone"), str(tmp_path / ".ssh" / "id_ed25519")]

    assert list_missing_keys(files) == (str(tmp_path / "gone"),)
    assert list_missing_keys(files, files[2]) == (files[2], files[1]), (
        "the key of the cluster file is meant, whatever its name"
    )
    assert list_missing_keys(files, files[0]) == (files[1],)
