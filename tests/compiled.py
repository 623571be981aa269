"""Small C programs of the tests, compiled once for each version of their source."""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path


@functools.cache
def compiled(source: Path, name: str, *options: str) -> Path:
    """Return the folder, which anybody may read, of a file `name` made of `source` by gcc.

    The folder is kept for later runs, unless somebody else has made one of its name.
    """
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    place = Path(tempfile.gettempdir()) / f"clusterctl-{source.stem}-{os.getuid()}-{digest}"
    place.mkdir(mode=0o755, exist_ok=True)
    if place.lstat().st_uid != os.getuid():
        place = Path(tempfile.mkdtemp(prefix=place.name))
        place.chmod(0o755)
    target = place / name
    if not target.exists():
        partial = place / f"{os.getpid()}.partial"
        subprocess.run(["gcc", "-O1", *options, "-o", partial, source], check=True)
        partial.replace(target)
    return place
