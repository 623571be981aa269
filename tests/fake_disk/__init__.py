"""A disk that has no locks, or that tells what was written through to it: see `disk.c`."""

from __future__ import annotations

from pathlib import Path

from tests.compiled import compiled

SOURCE = Path(__file__).with_name("disk.c")


def environment(*, no_locks: Path | None = None, synced: Path | None = None) -> dict[str, str]:
    """Return the environment of a process whose disk is like that."""
    wanted = {"NO_LOCKS": no_locks, "SYNCED": synced}
    library = compiled(SOURCE, "libdisk.so", "-shared", "-fPIC") / "libdisk.so"
    return {"LD_PRELOAD": str(library), **{key: str(path) for key, path in wanted.items() if path is not None}}


def synced(log: Path) -> list[tuple[Path, int]]:
    """Return what was written through to the disk, in order: each file with its size then."""
    lines = [line.split(" ", 1) for line in log.read_text().splitlines()]
    return [(Path(path), int(size)) for size, path in lines]
