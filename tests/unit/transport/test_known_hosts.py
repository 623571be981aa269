from __future__ import annotations

import base64
import fcntl
import re
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.transport.ssh.known_hosts import (
    HostKey,
    HostKeyVerdict,
    KeyNotAddedError,
    KnownHostsLine,
    append_key,
    hash_name,
    judge_host_key,
    load_known_hosts,
    order_algorithms,
    parse_known_hosts,
)
from tests.lab.waiting import wait_for

ED = HostKey("ssh-ed25519", b"\0\0\0\x0bssh-ed25519 one")
OTHER = HostKey("ssh-ed25519", b"\0\0\0\x0bssh-ed25519 two")
RSA = HostKey("ssh-rsa", b"\0\0\0\x07ssh-rsa three")


def line(names: str, key: HostKey, marker: str = "") -> str:
    return f"{marker} {names} {key.type} {base64.b64encode(key.blob).decode()} a comment\n".lstrip()


@pytest.mark.parametrize(
    ("text", "name", "verdict"),
    [
        pytest.param("", "gpu1", HostKeyVerdict.UNKNOWN, id="empty"),
        pytest.param(line("gpu1", ED), "gpu1", HostKeyVerdict.TRUSTED, id="plain"),
        pytest.param(line("GPU1", ED), "gpu1", HostKeyVerdict.TRUSTED, id="case"),
        pytest.param(line("other,gpu1", ED), "gpu1", HostKeyVerdict.TRUSTED, id="list"),
        pytest.param(line("gpu?", ED), "gpu1", HostKeyVerdict.TRUSTED, id="one-character"),
        pytest.param(line("*.lan,!gpu1.lan", ED), "gpu1.lan", HostKeyVerdict.UNKNOWN, id="negated"),
        pytest.param(line("[gpu1]:2222", ED), "[gpu1]:2222", HostKeyVerdict.TRUSTED, id="port"),
        pytest.param(line("gpu1", ED), "[gpu1]:2222", HostKeyVerdict.UNKNOWN, id="no-port-is-port-22"),
        pytest.param(line("[gpu1]:2222", ED), "gpu1", HostKeyVerdict.UNKNOWN, id="another-port"),
        pytest.param(line(hash_name("gpu1", b"salt" * 5), ED), "gpu1", HostKeyVerdict.TRUSTED, id="hidden"),
        pytest.param(line(hash_name("gpu1", b"salt" * 5), ED), "gpu2", HostKeyVerdict.UNKNOWN, id="hidden-other"),
        pytest.param(line("gpu1", OTHER), "gpu1", HostKeyVerdict.CHANGED, id="changed"),
        pytest.param(line("gpu1", RSA), "gpu1", HostKeyVerdict.CHANGED, id="another-type-only"),
        pytest.param(line("gpu1", OTHER) + line("gpu1", ED), "gpu1", HostKeyVerdict.TRUSTED, id="one-of-two"),
        pytest.param(line("*", ED, "@revoked") + line("gpu1", ED), "gpu1", HostKeyVerdict.REVOKED, id="revoked"),
        pytest.param(line("*", OTHER, "@cert-authority"), "gpu1", HostKeyVerdict.AUTHORITY, id="authority"),
        pytest.param(line("*", OTHER, "@cert-authority") + line("gpu1", ED), "gpu1", HostKeyVerdict.TRUSTED, id="both"),
        pytest.param(
            "# gpu1 x y\n\ngpu1\ngpu1 ssh-ed25519 %%%\n" + line("gpu1", ED), "gpu1", HostKeyVerdict.TRUSTED, id="torn"
        ),
        pytest.param("|1|torn ssh-ed25519 AAAA\n", "gpu1", HostKeyVerdict.UNKNOWN, id="torn-hidden"),
        pytest.param(line("gpu[12]", ED), "gpu1", HostKeyVerdict.UNKNOWN, id="brackets-are-no-pattern"),
        pytest.param(line("!gpu2,*", ED), "gpu1", HostKeyVerdict.TRUSTED, id="another-negated"),
        pytest.param(line("!GPU1,*", ED), "gpu1", HostKeyVerdict.UNKNOWN, id="negated-in-capitals"),
        pytest.param(
            line("*", OTHER, "@revoked") + line("gpu1", ED), "gpu1", HostKeyVerdict.TRUSTED, id="another-revoked"
        ),
        pytest.param(
            line("gpu2", ED, "@revoked") + line("gpu1", ED), "gpu1", HostKeyVerdict.TRUSTED, id="revoked-elsewhere"
        ),
        pytest.param(line("*", OTHER, "@revoked"), "gpu1", HostKeyVerdict.UNKNOWN, id="only-another-revoked"),
        pytest.param(line("*", ED, "@unheard-of"), "gpu1", HostKeyVerdict.UNKNOWN, id="a-marker-that-openssh-may-get"),
        pytest.param(
            line(hash_name("gpu1", b"salt").replace("|1|", "|2|"), ED), "gpu1", HostKeyVerdict.UNKNOWN, id="hidden-anew"
        ),
        pytest.param(line(hash_name("gpu1", b"salt") + "|", ED), "gpu1", HostKeyVerdict.UNKNOWN, id="hidden-and-more"),
        pytest.param(line("|1|%%%|AAAA", ED), "gpu1", HostKeyVerdict.UNKNOWN, id="hidden-in-no-base64"),
        pytest.param("  " + line("gpu1", ED), "gpu1", HostKeyVerdict.TRUSTED, id="indented"),
        pytest.param(line("#gpu1", ED), "#gpu1", HostKeyVerdict.UNKNOWN, id="a-comment"),
        pytest.param("@revoked\n@revoked gpu1 ssh-ed25519\n", "gpu1", HostKeyVerdict.UNKNOWN, id="a-marker-and-no-key"),
    ],
)
def test_a_key_is_worth_what_the_lines_about_its_host_say(text: str, name: str, verdict: HostKeyVerdict) -> None:
    assert judge_host_key(parse_known_hosts(text), name, ED).verdict is verdict


@pytest.mark.parametrize(
    ("text", "verdict", "number"),
    [
        pytest.param("# one\n" + line("gpu1", OTHER), HostKeyVerdict.CHANGED, 2, id="changed"),
        pytest.param(
            line("gpu1", RSA) + line("gpu1", OTHER), HostKeyVerdict.CHANGED, 2, id="changed, the line of its type"
        ),
        pytest.param(
            line("gpu1", RSA) + line("*", RSA), HostKeyVerdict.CHANGED, 1, id="changed, the first of another type"
        ),
        pytest.param(line("gpu1", RSA) + line("gpu1", ED), HostKeyVerdict.TRUSTED, 2, id="trusted"),
        pytest.param(line("gpu1", ED) + line("*", ED, "@revoked"), HostKeyVerdict.REVOKED, 2, id="revoked"),
        pytest.param(
            line("*", ED, "@unheard-of") + line("*", RSA, "@cert-authority"),
            HostKeyVerdict.AUTHORITY,
            2,
            id="authority",
        ),
    ],
)
def test_a_verdict_names_the_line_that_led_to_it(text: str, verdict: HostKeyVerdict, number: int) -> None:
    found = judge_host_key(parse_known_hosts(text, "/k"), "gpu1", ED)
    assert found.entry is not None
    assert (found.verdict, found.entry.path, found.entry.line) == (verdict, "/k", number)


def test_a_line_is_read_whole() -> None:
    (entry,) = parse_known_hosts(line("gpu1,[gpu1]:22", ED, "@revoked"), "/k")
    assert entry == KnownHostsLine("/k", 1, "@revoked", ("gpu1", "[gpu1]:22"), ED)
    assert parse_known_hosts(line("gpu1", ED))[0].path == ""


def test_a_hidden_name_of_openssh_is_found() -> None:
    # Made by `ssh-keygen -H` of OpenSSH 9.2 from a line for `lab.example`.
    hidden = "|1|eBNFHoFRyTOeVxkeYY1Ook+Jx5I=|Q8UL94tkZEwxw2KlaTVKHJt9GBY="
    assert parse_known_hosts(f"{hidden} ssh-ed25519 AAAA\n")[0].matches("lab.example")


def test_a_server_is_asked_for_the_types_that_are_filed() -> None:
    supported = ("ssh-ed25519", "ecdsa-sha2-nistp256", "rsa-sha2-512", "rsa-sha2-256")
    entries = parse_known_hosts(line("gpu1", RSA) + line("gpu2", ED))
    assert order_algorithms(entries, "gpu1", supported) == (
        "rsa-sha2-512",
        "rsa-sha2-256",
        "ssh-ed25519",
        "ecdsa-sha2-nistp256",
    )
    assert order_algorithms(entries, "gpu3", supported) == supported
    assert order_algorithms(entries, "gpu2", supported[::-1]) == ("ssh-ed25519", *supported[:0:-1])
    assert order_algorithms(parse_known_hosts(line("gpu1", RSA, "@revoked")), "gpu1", supported) == supported


def test_the_fingerprint_is_the_one_that_ssh_shows() -> None:
    blob = base64.b64decode("AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl")
    # GitHub's published key and fingerprint.
    assert HostKey("ssh-ed25519", blob).fingerprint == "SHA256:+DiY3wvvV6TuJJhbpZisF/zLDA0zPMSvHdkr4UvCOqU"


@pytest.mark.parametrize("hashed", [False, True])
def test_what_is_filed_is_trusted_and_what_was_there_is_kept(tmp_path: Path, hashed: bool) -> None:
    path = tmp_path / ".ssh" / "known_hosts"
    append_key(str(path), "gpu1", ED, hashed=hashed)
    path.write_text(path.read_text().rstrip("\n"))  # a hand-edited file without a last newline
    append_key(str(path), "[gpu2]:22", RSA, hashed=hashed)
    entries = load_known_hosts([str(path), str(tmp_path / "missing")])
    assert judge_host_key(entries, "gpu1", ED).verdict is HostKeyVerdict.TRUSTED
    assert judge_host_key(entries, "[gpu2]:22", RSA).verdict is HostKeyVerdict.TRUSTED
    assert ("gpu1" in path.read_text()) is not hashed
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_what_is_filed_is_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "known_hosts"
    for name in ("gpu1", "gpu2"):
        append_key(str(path), name, ED)
    assert [text.split()[:2] for text in path.read_text().splitlines()] == [["gpu1", ED.type], ["gpu2", ED.type]]
    with path.open("a") as file:
        file.write("torn")
    append_key(str(path), "gpu3", ED)
    assert path.read_text().splitlines()[2:] == ["torn", f"gpu3 {ED.type} {base64.b64encode(ED.blob).decode()}"]


def test_a_name_is_hidden_with_a_salt_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "known_hosts"
    for name in ("gpu1", "gpu2"):
        append_key(str(path), name, ED, hashed=True)
    salts = [text.split("|")[2] for text in path.read_text().splitlines()]
    assert len(set(salts)) == 2
    assert [len(base64.b64decode(salt)) for salt in salts] == [20, 20]


@pytest.mark.parametrize(
    "held",
    [
        pytest.param(f"ssh-ed25519 {base64.b64encode(ED.blob).decode()} me@home\n", id="a-login-key"),
        pytest.param(f"ssh-ed25519 {base64.b64encode(ED.blob).decode()}", id="a-login-key-alone"),
        pytest.param('from="10.*" ssh-ed25519 AAAA me\n', id="a-login-key-with-options"),
        pytest.param('restrict,command="x" ssh-ed25519 AAAA me\n', id="a-login-key-with-more"),
        pytest.param("export PATH=/x:$PATH and more\n", id="a-script"),
        pytest.param(line("gpu1", ED) + "<<<<<<< HEAD of a merge\n", id="a-merge"),
    ],
)
def test_nothing_is_filed_where_a_line_is_none_of_known_hosts(tmp_path: Path, held: str) -> None:
    path = tmp_path / "file"
    path.write_text(held)
    with pytest.raises(KeyNotAddedError, match="line [12] of .* is not a line of a known_hosts file"):
        append_key(str(path), "gpu2", ED)
    assert path.read_text() == held


@pytest.mark.parametrize(
    "held",
    [
        pytest.param("# a comment\n\n", id="comment"),
        pytest.param("gpu3 1024 35 1234567890\n", id="ssh-1"),
        pytest.param(line("*", RSA, "@revoked") + line("*.lan,!x", RSA, "@cert-authority"), id="markers"),
        pytest.param(line(hash_name("x", b"salt" * 5), ED), id="hidden"),
        pytest.param(line("[fe80::1%eth0]:22", ED), id="scope"),
        pytest.param("gpu3 ssh-ed255", id="torn"),
        pytest.param(line("ssh-gw.lan", ED) + line("sk-node1", ED) + line("ecdsa-lab", RSA), id="host-called-so"),
        pytest.param("ssh-g", id="torn-host-called-so"),
    ],
)
def test_a_key_is_filed_beside_all_that_known_hosts_may_hold(tmp_path: Path, held: str) -> None:
    path = tmp_path / "file"
    path.write_text(held)
    append_key(str(path), "gpu2", ED)
    assert path.read_text().startswith(held)
    assert judge_host_key(load_known_hosts([str(path)]), "gpu2", ED).verdict is HostKeyVerdict.TRUSTED


@pytest.mark.parametrize(
    "name", ["*", "gpu1,gpu2", "gpu1 x", "@revoked", "!gpu1", "a;b", "|1|x|y", "", "gpu1\n*", "-x"]
)
def test_nothing_is_filed_under_what_is_no_host(tmp_path: Path, name: str) -> None:
    with pytest.raises(KeyNotAddedError, match="is not the name of a host"):
        append_key(str(tmp_path / "file"), name, ED)
    assert not (tmp_path / "file").exists()


def test_of_two_keys_for_one_name_that_come_at_once_one_is_filed(tmp_path: Path) -> None:
    path = tmp_path / "known_hosts"
    refused: list[str] = []

    def file() -> None:
        try:
            append_key(str(path), "gpu1", OTHER)
        except KeyNotAddedError as error:
            refused.append(str(error))

    with path.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        second = threading.Thread(target=file)
        second.start()
        waits = re.compile(rf"-> FLOCK .*:{path.stat().st_ino} ")
        wait_for(lambda: waits.search(Path("/proc/locks").read_text()), what="the second to wait for the lock")
        held.write(line("gpu1", ED))
    second.join()
    assert path.read_text() == line("gpu1", ED)
    assert refused == [f"{path}:1 has another key for `gpu1`"]


def test_a_key_that_is_filed_by_now_is_not_filed_twice(tmp_path: Path) -> None:
    path = tmp_path / "known_hosts"
    for _ in range(2):
        append_key(str(path), "gpu1", ED)
    assert path.read_text().count("\n") == 1


def test_files_of_any_bytes_are_read_and_those_that_are_not_there_passed_over(tmp_path: Path) -> None:
    (tmp_path / "some").write_bytes(b"# \xff\n" + line("gpu1", ED).encode())
    found = load_known_hosts([str(tmp_path / "missing"), str(tmp_path), str(tmp_path / "some")])
    assert [(entry.path, entry.line) for entry in found] == [(str(tmp_path / "some"), 2)]


def test_a_name_of_any_bytes_can_be_hidden() -> None:
    assert hash_name("gpu\udcff", b"salt").startswith("|1|c2FsdA==|")


@given(st.text())
def test_no_text_at_all_breaks_the_parser(text: str) -> None:
    for entry in parse_known_hosts(text):
        entry.matches("gpu1")


def test_what_a_key_is_worth_has_a_word_to_be_told_with() -> None:
    assert [verdict.value for verdict in HostKeyVerdict] == ["trusted", "unknown", "changed", "revoked", "authority"]
