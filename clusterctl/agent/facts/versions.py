"""Versions that must be equal on all nodes, from the names of package metadata: nothing is imported.

The probe runs in the job's Python, so `sys.path` is the job's. Reading the names of `*.dist-info` folders takes
milliseconds; `importlib.metadata` would take a tenth of a second for a large environment. Shared libraries are found as
the loader would find them, without loading any.
"""

from __future__ import annotations

import os
import re
import sys
import zlib

from clusterctl.agent.linux import sysfs

TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any


_USUAL = ("/lib64", "/usr/lib64", "/lib", "/usr/lib", "/usr/local/lib")


def find_library(name: str, root: str = "/", *, prefix: str | None = None) -> str | None:
    """Return the path of a library: on LD_LIBRARY_PATH, beside the Python, in the loader's cache, in a usual folder."""
    listed = [place for place in os.environ.get("LD_LIBRARY_PATH", "").split(":") if place]
    own = os.path.join(sys.prefix if prefix is None else prefix, "lib")
    for place in [*listed, own]:
        if os.path.exists(sysfs.join_root(root, f"{place}/{name}")):
            return f"{place.rstrip('/')}/{name}"
    return _cached(name, root) or next(
        (f"{place}/{name}" for place in _USUAL if os.path.exists(sysfs.join_root(root, f"{place}/{name}"))), None
    )


def _cached(name: str, root: str) -> str | None:
    """Return the path of a name in `/etc/ld.so.cache`, whose strings end in a zero byte (ldconfig(8))."""
    data = sysfs.read_bytes_or_none(sysfs.join_root(root, "/etc/ld.so.cache")) or b""
    end = data.find(f"/{name}\0".encode())
    if end < 0:
        return None
    path = data[data.rfind(b"\0", 0, end) + 1 : data.index(b"\0", end)].decode("utf-8", "surrogateescape")
    return path if os.path.exists(sysfs.join_root(root, path)) else None


_TOLD = (
    "torch",
    "keras",
    "tensorflow",
    "tensorflow-cpu",
    "jax",
    "jaxlib",
    "numpy",
    "transformers",
    "triton",
    "flash-attn",
    "deepspeed",
    "lightning",
)
_JAX_CUDA = re.compile(r"jax-cuda\d+-plugin$")
"""Packages that show the CUDA version of a JAX; its own package does not."""
_NCCL = re.compile(r"nvidia-nccl-cu\d+$")
_NCCL_FILE = re.compile(r"libnccl\.so\.(\d+\.\d+\.\d+)$")
_BUILT = r"^{}(?:\s*:[^=]*)?\s*=\s*['\"]([\d.]+)[^'\"]*['\"]"
"""How `torch/version.py` states its CUDA or HIP version."""


def collect_versions(root: str = "/") -> dict[str, Any]:
    """Return the group `versions`. `root` is the prefix of the machine's libraries."""
    packages, places = _packages()
    listing = "\n".join(f"{name}=={packages[name]}" for name in sorted(packages)).encode()
    return {
        "python": ".".join(map(str, sys.version_info[:3])),
        "executable": sys.executable,
        "torch": packages.get("torch"),
        "torch_cuda": _torch(places.get("torch"), "cuda"),
        "torch_hip": _torch(places.get("torch"), "hip"),
        **_nccl(packages, root),
        "net_plugin": _net_plugin(root),
        "verbs": find_library("libibverbs.so.1", root) or find_library("libibverbs.so", root),
        "packages": len(packages),
        "packages_hash": f"{zlib.crc32(listing):08x}{zlib.adler32(listing):08x}",
        "names": {name: text for name, text in packages.items() if name in _TOLD or _JAX_CUDA.match(name)},
    }


def _nccl(packages: dict[str, str], root: str) -> dict[str, Any]:
    """Return version and origin of the NCCL that torch would load.

    A preloaded library comes first. Torch from PyPI finds the package beside it (its RPATH precedes LD_LIBRARY_PATH).
    Without it, as in conda and in NVIDIA's containers, the loader finds the library.
    """
    preloaded = [path for path in re.split("[ :]", os.environ.get("LD_PRELOAD", "")) if "libnccl.so" in path]
    package = next((version for name, version in sorted(packages.items()) if _NCCL.match(name)), None)
    if package is not None and not preloaded:
        return {"nccl": package, "nccl_from": "package"}
    path = preloaded[0] if preloaded else find_library("libnccl.so.2", root)
    if path is None:
        return {"nccl": None, "nccl_from": None}
    named = _NCCL_FILE.search(os.path.realpath(sysfs.join_root(root, path)))
    return {"nccl": named.group(1) if named else None, "nccl_from": path}


def _net_plugin(root: str) -> str | None:
    """Return the library that NCCL would use to reach other nodes, such as aws-ofi-nccl."""
    name = os.environ.get("NCCL_NET_PLUGIN", "")
    if "/" in name or name == "none":
        return name if name != "none" and os.path.exists(sysfs.join_root(root, name)) else None
    return find_library(f"libnccl-net-{name}.so" if name else "libnccl-net.so", root)


def _packages() -> tuple[dict[str, str], dict[str, str]]:
    """Return packages by version and by place; the first on the path wins, as for an import."""
    packages: dict[str, str] = {}
    places: dict[str, str] = {}
    for place in dict.fromkeys(sys.path):
        try:
            entries = sorted(os.listdir(place or "."))
        except OSError:
            continue
        for entry in entries:
            stem, suffix = os.path.splitext(entry)
            if suffix not in (".dist-info", ".egg-info"):
                continue
            name, _, rest = stem.partition("-")
            version = rest.split("-py")[0] if suffix == ".egg-info" else rest
            name = re.sub(r"[-_.]+", "-", name).lower()
            if version and name not in packages:
                packages[name], places[name] = version, place
    return packages, places


def _torch(place: str | None, what: str) -> str | None:
    """Return the CUDA or HIP version of torch, from the text of its version file."""
    if place is None:
        return None
    try:
        with open(os.path.join(place, "torch", "version.py"), encoding="utf-8") as file:
            built = re.search(_BUILT.format(what), file.read(8192), re.MULTILINE)
    except OSError:
        return None
    return built.group(1) if built else None
