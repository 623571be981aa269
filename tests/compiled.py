"""Small C programs of the tests, compiled once for each version of their source."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from pathlib import Path


def compiled(source: Path, name: str, *options: str) -> Path:
    """Return the folder, which anybody may read, of a file `name` made of `source` by gcc."""
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    place = Path(tempfile.gettempdir()) / f"clusterctl-{source.stem}-{os.getuid()}-{digest}"
    target = place / name
    if not target.exists():
        place.mkdir(mode=0o755, exist_ok=True)
        partial = place / f"{os.getpid()}.partial"
        subprocess.run(["gcc", "-O1", *options, "-o", partial, source], check=True)
        partial.replace(target)
    return place
