"""Locales whose encoding is not UTF-8, made for the tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

NAME: Final = "de_DE"


def unavailable() -> str | None:
    """Why none can be made here, or None."""
    return None if Path("/usr/share/i18n/charmaps").is_dir() else "there are no sources: apt-get install locales"


def latin() -> dict[str, str]:
    """Return the environment of an account whose encoding is ISO 8859-1; a node has to see the folder in LOCPATH."""
    folder = Path(tempfile.gettempdir()) / f"clusterctl-locales-{os.getuid()}"
    if not (folder / NAME).exists():
        partial = folder / f"{os.getpid()}.partial"
        partial.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)
        argv = ["localedef", "--no-archive", "-i", NAME, "-f", "ISO-8859-1", str(partial / NAME)]
        subprocess.run(argv, check=True, capture_output=True)
        (partial / NAME).rename(folder / NAME)
        shutil.rmtree(partial)
    return {"LOCPATH": str(folder), "LC_ALL": NAME}
