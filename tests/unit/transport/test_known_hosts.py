from __future__ import annotations

import base64
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.transport.known_hosts import (
    HostKey,
    Verdict,
    append,
    hide,
    judge,
    load,
    parse,
    preferred_algorithms,
)

if TYPE_CHECKING:
    from pathlib import Path

ED = HostKey("ssh-ed25519", b"\0\0\0\x0bssh-ed25519 one")
OTHER = HostKey("ssh-ed25519", b"\0\0\0\x0bssh-ed25519 two")
RSA = HostKey("ssh-rsa", b"\0\0\0\x07ssh-rsa three")


def line(names: str, key: HostKey, marker: str = "") -> str:
    return f"{marker} {names} {key.type} {base64.b64encode(key.blob).decode()} a comment\n".lstrip()


@pytest.mark.parametrize(
    ("text", "name", "verdict"),
    [
        pytest.param("", "gpu1", Verdict.UNKNOWN, id="empty"),
        pytest.param(line("gpu1", ED), "gpu1", Verdict.TRUSTED, id="plain"),
        pytest.param(line("GPU1", ED), "gpu1", Verdict.TRUSTED, id="case"),
        pytest.param(line("other,gpu1", ED), "gpu1", Verdict.TRUSTED, id="list"),
        pytest.param(line("gpu?", ED), "gpu1", Verdict.TRUSTED, id="one-character"),
        pytest.param(line("*.lan,!gpu1.lan", ED), "gpu1.lan", Verdict.UNKNOWN, id="negated"),
        pytest.param(line("[gpu1]:2222", ED), "[gpu1]:2222", Verdict.TRUSTED, id="port"),
        pytest.param(line("gpu1", ED), "[gpu1]:2222", Verdict.UNKNOWN, id="no-port-is-port-22"),
        pytest.param(line("[gpu1]:2222", ED), "gpu1", Verdict.UNKNOWN, id="another-port"),
        pytest.param(line(hide("gpu1", b"salt" * 5), ED), "gpu1", Verdict.TRUSTED, id="hidden"),
        pytest.param(line(hide("gpu1", b"salt" * 5), ED), "gpu2", Verdict.UNKNOWN, id="hidden-other"),
        pytest.param(line("gpu1", OTHER), "gpu1", Verdict.CHANGED, id="changed"),
        pytest.param(line("gpu1", RSA), "gpu1", Verdict.CHANGED, id="another-type-only"),
        pytest.param(line("gpu1", OTHER) + line("gpu1", ED), "gpu1", Verdict.TRUSTED, id="one-of-two"),
        pytest.param(line("*", ED, "@revoked") + line("gpu1", ED), "gpu1", Verdict.REVOKED, id="revoked"),
        pytest.param(line("*", OTHER, "@cert-authority"), "gpu1", Verdict.AUTHORITY, id="authority"),
        pytest.param(line("*", OTHER, "@cert-authority") + line("gpu1", ED), "gpu1", Verdict.TRUSTED, id="both"),
        pytest.param(
            "# gpu1 x y\n\ngpu1\ngpu1 ssh-ed25519 %%%\n" + line("gpu1", ED), "gpu1", Verdict.TRUSTED, id="torn"
        ),
        pytest.param("|1|torn ssh-ed25519 AAAA\n", "gpu1", Verdict.UNKNOWN, id="torn-hidden"),
    ],
)
def test_a_key_is_worth_what_the_lines_about_its_host_say(text: str, name: str, verdict: Verdict) -> None:
    assert judge(parse(text), name, ED).verdict is verdict


def test_a_verdict_names_the_line_that_led_to_it() -> None:
    entry = judge(parse("# one\n" + line("gpu1", OTHER), "/k"), "gpu1", ED).entry
    assert entry is not None
    assert (entry.path, entry.line) == ("/k", 2)


def test_a_hidden_name_of_openssh_is_found() -> None:
    # Made by `ssh-keygen -H` of OpenSSH 9.2 from a line for `lab.example`.
    hidden = "|1|eBNFHoFRyTOeVxkeYY1Ook+Jx5I=|Q8UL94tkZEwxw2KlaTVKHJt9GBY="
    assert parse(f"{hidden} ssh-ed25519 AAAA\n")[0].matches("lab.example")


def test_a_server_is_asked_for_the_types_that_are_filed() -> None:
    supported = ("ssh-ed25519", "ecdsa-sha2-nistp256", "rsa-sha2-512", "rsa-sha2-256")
    entries = parse(line("gpu1", RSA) + line("gpu2", ED))
    assert preferred_algorithms(entries, "gpu1", supported) == (
        "rsa-sha2-512",
        "rsa-sha2-256",
        "ssh-ed25519",
        "ecdsa-sha2-nistp256",
    )
    assert preferred_algorithms(entries, "gpu3", supported) == supported


def test_the_fingerprint_is_the_one_that_ssh_shows() -> None:
    blob = base64.b64decode("AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl")
    # GitHub's published key and fingerprint.
    assert HostKey("ssh-ed25519", blob).fingerprint == "SHA256:+DiY3wvvV6TuJJhbpZisF/zLDA0zPMSvHdkr4UvCOqU"


@pytest.mark.parametrize("hashed", [False, True])
def test_what_is_filed_is_trusted_and_what_was_there_is_kept(tmp_path: Path, hashed: bool) -> None:
    path = tmp_path / ".ssh" / "known_hosts"
    append(str(path), "gpu1", ED, hashed=hashed)
    path.write_text(path.read_text().rstrip("\n"))  # a hand-edited file without a last newline
    append(str(path), "[gpu2]:22", RSA, hashed=hashed)
    entries = load([str(path), str(tmp_path / "missing")])
    assert judge(entries, "gpu1", ED).verdict is Verdict.TRUSTED
    assert judge(entries, "[gpu2]:22", RSA).verdict is Verdict.TRUSTED
    assert ("gpu1" in path.read_text()) is not hashed
    assert path.stat().st_mode & 0o777 == 0o600


@given(st.text())
def test_no_text_at_all_breaks_the_parser(text: str) -> None:
    for entry in parse(text):
        entry.matches("gpu1")
