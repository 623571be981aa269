"""What is mounted where, as the kernel's table tells it to everybody who asks: names may hold any byte."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from clusterctl.agent.facts import storage_facts
from clusterctl.agent.linux import cgroup, filesystems
from clusterctl.agent.node_state import run_dir

if TYPE_CHECKING:
    from pathlib import Path

NAMES = [
    pytest.param(b"with a blank", rb"with\040a\040blank", id="a blank"),
    pytest.param(b"a\ttab and\nlines", rb"a\011tab\040and\012lines", id="a tab and a line end"),
    pytest.param(rb"a\040 literally", rb"a\134040\040literally", id="what looks like an octal number"),
    pytest.param("größe".encode(), "größe".encode(), id="letters of UTF-8"),
    pytest.param(b"caf\xe9", b"caf\xe9", id="bytes that are no UTF-8"),
]


def write_table(root: Path, *lines: bytes) -> str:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/mounts").write_bytes(b"".join(line + b"\n" for line in lines))
    return str(root)


def text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


@pytest.mark.parametrize(("name", "escaped"), NAMES)
def test_the_table_names_folders_as_they_are(tmp_path: Path, name: bytes, escaped: bytes) -> None:
    root = write_table(
        tmp_path, b"/dev/sda / ext4 rw 0 0", b"filer:/" + escaped + b" /mnt/" + escaped + b" nfs4 ro,hard 0 0"
    )

    assert filesystems.list_mounts(root)[1] == filesystems.Mount(
        f"filer:/{text(name)}", f"/mnt/{text(name)}", "nfs4", "ro,hard"
    )


@pytest.mark.parametrize(("name", "escaped"), NAMES)
def test_a_network_mount_of_any_name_is_known_as_one_and_looked_at(tmp_path: Path, name: bytes, escaped: bytes) -> None:
    place = tmp_path / text(name)
    place.mkdir()
    point = str(tmp_path).encode() + b"/" + escaped
    root = write_table(tmp_path, b"/dev/sda / ext4 rw 0 0", b"filer:/x " + point + b" nfs4 rw 0 0")

    assert run_dir.is_on_network_filesystem(str(place / "home"), root)
    (entry,) = storage_facts.collect_mounts(root, [], time.monotonic() + 3)["paths"]
    assert (entry["path"], entry["device"], entry["status"]) == (str(place), "filer:/x", "ok")


@pytest.mark.parametrize(("name", "escaped"), NAMES)
def test_control_groups_mounted_in_a_folder_of_any_name_are_found(tmp_path: Path, name: bytes, escaped: bytes) -> None:
    place = tmp_path / "sys" / text(name)
    place.mkdir(parents=True)
    (place / "cpu.max").write_text("150000 100000\n")
    root = write_table(tmp_path, b"cgroup2 /sys/" + escaped + b" cgroup2 rw 0 0")
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")

    assert cgroup.read_cpu_limit(root) == 1.5


def test_of_two_mounts_at_one_place_the_later_one_is_seen() -> None:
    table = [filesystems.Mount("/dev/sda", "/data", "ext4", "rw"), filesystems.Mount("filer:/x", "/data", "nfs", "rw")]

    holder = filesystems.find_mount("/data/run", table)

    assert holder is not None
    assert holder.fstype == "nfs"


@pytest.mark.parametrize("path", ["/database", "/", "/mnt/data"])
def test_a_mount_holds_nothing_beside_it(path: str) -> None:
    assert filesystems.find_mount(path, [filesystems.Mount("/dev/sda", "/data", "ext4", "rw")]) is None
