"""Packs a Python for nodes that have none of the wanted version. uv downloads it to the head."""

from __future__ import annotations

import re
import secrets
import tarfile
from pathlib import Path

from clusterctl.errors import EnvironmentFailed
from clusterctl.run.environments.locked_packages import Platform
from clusterctl.run.environments.recipe import get_cache_folder, run_uv


def pack_python(platform: Platform) -> Path:
    """Return an archive with a folder that contains a relocatable Python; its name is the name of the folder.

    Raises:
        EnvironmentFailed: uv cannot download this Python, or the head has no space.
    """
    libc = "gnu" if platform.glibc_minor is not None else "musl"
    suffix = f"linux-{platform.machine}-{libc}"
    purpose = f"no node has Python {platform.python}, and it cannot be downloaded"
    run_uv("python", "install", f"cpython-{platform.python}-{suffix}", "--no-bin", purpose=purpose)
    root = Path(run_uv("python", "dir", purpose=purpose).strip())
    found = [path for path in root.glob(f"cpython-{platform.python}.*-{suffix}") if not path.is_symlink()]
    if not found:
        raise EnvironmentFailed(f"{purpose}: uv has installed no {suffix} build of it in {root}")
    newest = max(found, key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)[:3]])
    archive = get_cache_folder("pythons") / f"{newest.name}.tar.gz"
    if not archive.is_file():
        part = archive.with_name(f".{secrets.token_hex(8)}")
        try:
            with tarfile.open(part, mode="x:gz", compresslevel=4) as packed:
                packed.add(newest, newest.name, filter=lambda one: None if "__pycache__" in one.name else one)
            part.replace(archive)
        except OSError as error:
            raise EnvironmentFailed(f"cannot pack {newest}: {error.strerror}") from error
        finally:
            part.unlink(missing_ok=True)
    return archive
