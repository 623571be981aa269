from __future__ import annotations

import ast
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.transport import bootstrap
from clusterctl.transport.agent_archive import load_agent_archive, pack_files
from clusterctl.transport.bootstrap import NOISE_BYTES, PreambleParser, make_start_script

BUNDLE = pack_files({"__main__.py": b""})
noise = st.binary(max_size=200).filter(lambda data: b"clusterctl:" not in data)


@given(noise, st.sampled_from(["have", "need"]), st.binary(max_size=50), st.lists(st.integers(1, 7), max_size=60))
def test_the_preamble_is_found_however_it_is_cut_and_surrounded(
    before: bytes, word: str, after: bytes, cuts: list[int]
) -> None:
    stream = before + f"\nclusterctl:nonce:{word} text\n".encode() + after
    parser = PreambleParser("nonce")
    rest = stream
    found = None
    for cut in [*cuts, len(stream)]:
        found = parser.feed(rest[:cut])
        rest = rest[cut:]
        if found:
            break
    assert found is not None
    assert found[:2] == (word, "text")
    assert found[2] + rest == after
    assert parser.earlier_output == before.decode("utf-8", "replace").strip()


def test_interpreters_that_were_rejected_are_remembered() -> None:
    parser = PreambleParser("n")
    lines = b"\nclusterctl:n:old 3.6.8 /usr/bin/python3\n\nclusterctl:n:broken /x: no zlib\n\nclusterctl:n:none \n"
    assert parser.feed(lines) == ("none", "", b"")
    assert parser.rejected == ["`/usr/bin/python3` is Python 3.6.8", "/x: no zlib"]


def test_noise_is_bounded() -> None:
    parser = PreambleParser("n")
    assert parser.feed(b"x" * NOISE_BYTES) is None
    with pytest.raises(ValueError, match="no preamble"):
        parser.feed(b"x")


def test_an_echo_of_the_script_is_not_a_preamble() -> None:
    assert b"clusterctl:nonce:" not in make_start_script("nonce", BUNDLE, ())


def test_what_a_user_wrote_is_quoted() -> None:
    text = make_start_script("n", BUNDLE, ["/a'; reboot #"], preferred_pythons=["$(id)"]).decode()
    assert shlex.quote("/a'; reboot #") in text
    assert "'$(id)'" in text


def test_the_script_fits_into_one_packet() -> None:
    assert len(make_start_script("n" * 16, BUNDLE, ())) < 8192


def test_what_is_sent_of_the_first_python_means_what_was_written() -> None:
    sent = make_start_script("n", BUNDLE, ()).decode().partition("stage='")[2].partition("'\n")[0]
    assert ast.dump(ast.parse(sent)) == ast.dump(ast.parse(bootstrap._STAGE))


def test_the_same_files_make_the_same_bundle_in_any_order() -> None:
    one = pack_files({"a.py": b"1", "b.py": b"2"})
    assert one == pack_files({"b.py": b"2", "a.py": b"1"})
    assert one.sha256 != pack_files({"a.py": b"1", "b.py": b"3"}).sha256


def test_the_agent_travels_with_all_that_it_imports() -> None:
    import io
    import zipfile

    names = set(zipfile.ZipFile(io.BytesIO(load_agent_archive().data)).namelist())
    assert {
        "__main__.py",
        "clusterctl/__init__.py",
        "clusterctl/agent/protocol/command_messages.py",
        "pynvml.py",
    } <= names
    assert {"clusterctl/agent/__init__.py", "clusterctl/agent/facts/__init__.py"} <= names
    assert not any(name.startswith(("clusterctl/run", "clusterctl/transport")) for name in names)
