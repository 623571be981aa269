"""Pythons that lack what some builds lack, made of the system's: files and symbols are missing, nothing is hidden.

`_ctypes` is a file that a build without libffi's headers does not have. `os.memfd_create` and its kin are not compiled
in where the headers of the build were old; here, a copy of the interpreter has them under other names.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SYSTEM: Final = "/usr/bin/python3"
OLD_HEADERS: Final = ("memfd_create", "pidfd_open", "pidfd_send_signal")
"""What Pythons lack that were built on CentOS 7, as conda-forge's and the older ones of uv are."""

_ASK: Final = """\
import json, os, sys, sysconfig
print(json.dumps([os.path.realpath(sys.executable), sysconfig.get_path("stdlib")]))
"""


def unavailable() -> str | None:
    """Why none can be made here, or None."""
    if not os.path.exists(SYSTEM):
        return f"there is no {SYSTEM}"
    _, library = _system()
    if not list((library / "lib-dynload").glob("_ctypes.*.so")):
        return f"{SYSTEM} has no `_ctypes` of its own to leave out"
    return None


def without_ctypes() -> str:
    """Return the path of a Python that has no `_ctypes`."""
    return _made("without-ctypes", missing=("_ctypes.", "_ctypes_test."), renamed=())


def without_new_calls() -> str:
    """Return the path of a Python that has none of `OLD_HEADERS`."""
    return _made("old-headers", missing=(), renamed=OLD_HEADERS)


def _system() -> tuple[Path, Path]:
    said = subprocess.run([SYSTEM, "-I", "-c", _ASK], capture_output=True, text=True, check=True).stdout
    program, library = json.loads(said)
    return Path(program), Path(library)


def _made(name: str, missing: Sequence[str], renamed: Sequence[str]) -> str:
    program, library = _system()
    version = f"{program} {program.stat().st_mtime_ns} {Path(__file__).read_text()}"
    digest = hashlib.sha256(version.encode()).hexdigest()[:12]
    prefix = Path(tempfile.gettempdir()) / f"clusterctl-python-{name}-{os.getuid()}-{digest}"
    if not prefix.exists():
        partial = prefix.with_name(f"{prefix.name}.{os.getpid()}")
        _install(partial, program, library, missing, renamed)
        partial.rename(prefix)
    return str(prefix / "bin" / "python3")


def _install(prefix: Path, program: Path, library: Path, missing: Sequence[str], renamed: Sequence[str]) -> None:
    """Make a prefix whose standard library is links to the system's files."""
    (prefix / "bin").mkdir(parents=True)
    own = prefix / "bin" / program.name
    shutil.copy(program, own)
    for symbol in renamed:
        _rename(own, symbol)
    (prefix / "bin" / "python3").symlink_to(program.name)
    modules = prefix / "lib" / library.name
    (modules / "lib-dynload").mkdir(parents=True)
    for file in (*library.iterdir(), *(library / "lib-dynload").iterdir()):
        if file.name != "lib-dynload" and not file.name.startswith(tuple(missing)):
            (modules / file.relative_to(library)).symlink_to(file)


def _rename(program: Path, symbol: str) -> None:
    """Give a function of a C module another name: the text that it is entered by in the module's table.

    Its first letter is changed: the end of one text may be the whole of another.
    """
    data = bytearray(program.read_bytes())
    old, new = f"{symbol}\0".encode(), f"_{symbol[1:]}\0".encode()
    start, end = _section(data, b".rodata")
    found = list(_places(data, old, start, end))
    assert found, f"{program} has no {symbol}"
    for at in found:
        data[at : at + len(old)] = new
    program.write_bytes(data)


def _places(data: bytearray, text: bytes, start: int, end: int) -> Iterator[int]:
    at = data.find(text, start, end)
    while at >= 0:
        yield at
        at = data.find(text, at + 1, end)


def _section(data: bytearray, name: bytes) -> tuple[int, int]:
    """Where a section of an ELF file of 64 bits begins and ends."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, table + size * i) for i in range(count)]
    text = headers[names][4]
    for label, _, _, _, offset, length in headers:
        if data[text + label : data.index(0, text + label)] == name:
            return offset, offset + length
    raise ValueError(f"no section {name!r}")
