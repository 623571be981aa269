"""Write the locks of what is installed, with the hash of each file; `--check` says whether they are those of pyproject.

torch, and what comes with it (`[train]`), is in none: its CPU and CUDA builds have one version and different files.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

LOCKS = {"head.lock": [], "dev.lock": ["--extra", "dev"]}
BUILD = "requirements/build.in"


def main() -> int:
    """Write or check; the answer is the exit code."""
    if sys.argv[1:] == ["--check"]:
        stale = [name for name in LOCKS if Path("requirements", name).read_text().partition("\n")[0] != header()]
        if stale:
            print(f"error: {', '.join(stale)}: not made of this pyproject.toml\n\nhint: run `make lock`")
        return int(bool(stale))
    for name, extras in LOCKS.items():
        command = ["uv", "pip", "compile", "--universal", "--python-version", "3.10", "--generate-hashes", "--quiet"]
        command += ["--no-annotate", "--no-header", "--upgrade", *extras, "pyproject.toml", BUILD]
        done = subprocess.run([sys.executable, "-m", *command], check=True, capture_output=True, text=True)
        Path("requirements", name).write_text(f"{header()}\n{done.stdout}")
    return 0


def header() -> str:
    """Return the first line of a lock: what it was made of."""
    declared = Path("pyproject.toml").read_text().partition("[project]")[2].partition("[project.scripts]")[0]
    made_of = hashlib.sha256((declared + Path(BUILD).read_text()).encode()).hexdigest()[:16]
    return f"# by `make lock`, of pyproject.toml {made_of}"


sys.exit(main())
