"""Collects facts of the machine: limits, main memory, processors, environment variables and versions of libraries.

For most environment variables only a hash is reported. The variables in `nccl.conf` are included, because NCCL reads
this file (NVIDIA's NCCL user guide, environment variables).

Versions of packages come from the names of metadata folders, without any import. The probe runs in the job's Python, so
`sys.path` is the same as in the job. Reading the names of `*.dist-info` folders takes milliseconds;
`importlib.metadata` would take a tenth of a second in a large environment. The module searches shared libraries in the
same way as the loader, but does not load them.
"""

from __future__ import annotations

import collections
import os
import re
import resource
import sys
import time
import zlib

from clusterctl.agent.linux import cgroup, kernel_files, logind_and_nccl_files, proc, syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


_CAP_IPC_LOCK, _CAP_SYS_ADMIN, _CAP_SYS_RESOURCE = 14, 21, 24
"""The numbers of three Linux capabilities in linux/capability.h."""


def collect_limits(root: str) -> dict[str, Any]:
    """Return the resource limits of this process, for the group `host`."""
    groups = "" if root == "/" else root.rstrip("/")
    memory, processes = cgroup.read_memory_limit(groups), cgroup.read_process_limit(groups)
    may = _read_capabilities(root)
    return {
        # The kernel does not apply this limit to a process with one of these capabilities (`ib_umem_get`,
        # `copy_process`).
        "memlock": None if may >> _CAP_IPC_LOCK & 1 else _get_rlimit(resource.RLIMIT_MEMLOCK),
        "nproc": None if may & (1 << _CAP_SYS_ADMIN | 1 << _CAP_SYS_RESOURCE) else _get_rlimit(resource.RLIMIT_NPROC),
        "nofile": _get_rlimit(resource.RLIMIT_NOFILE),
        "cgroup_mem_max": memory[0] if memory else None,
        "cgroup_mem_free": memory[1] if memory else None,
        "pids_max": processes[0] if processes else None,
        "pids_free": processes[1] if processes else None,
        "cpu_quota": cgroup.read_cpu_limit(groups),
        "cpus": os.cpu_count(),
        "cpus_allowed": len(os.sched_getaffinity(0)),
        "shm": _read_shm(root),
    }


def _get_rlimit(which: int) -> int | None:
    soft = resource.getrlimit(which)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _read_capabilities(root: str) -> int:
    """Return the capabilities of this process as bits; 0 in a user namespace, whose capabilities the kernel ignores."""
    if (kernel_files.read_text(root, "/proc/self/uid_map") or "").split() != ["0", "0", "4294967295"]:
        return 0
    words = proc.read_status_field(kernel_files.join_root(root, "/proc/self"), "CapEff")
    return int(words[0], 16) if words else 0


def _read_shm(root: str) -> dict[str, Any] | None:
    try:
        statvfs = os.statvfs(kernel_files.join_root(root, "/dev/shm"))  # noqa: S108, RUF100
    except OSError:
        return None
    return {"total": statvfs.f_blocks * statvfs.f_frsize, "free": statvfs.f_bavail * statvfs.f_frsize}


_SWAP_INTERVAL_S = 0.2
"""The seconds between two readings of the swap counters."""


def collect_memory(root: str) -> dict[str, Any]:
    """Return the facts about memory and swap space, for the group `host`."""
    sizes = proc.read_meminfo(root)
    total, free = sizes.get("SwapTotal"), sizes.get("SwapFree")
    used = None if total is None or free is None else total - free
    return {
        "mem_total": sizes.get("MemTotal"),
        "mem_available": sizes.get("MemAvailable"),
        "swap_used": used,
        # Measure the rate only if the swap space is in use.
        "swap_rate": _measure_swap_rate(root) if used else 0.0 if used == 0 else None,
    }


def _measure_swap_rate(root: str) -> float | None:
    """Return the bytes per second that the kernel moves to and from the swap space."""
    began, before = time.monotonic(), _read_swapped_bytes(root)
    syscalls.sleep_interval(_SWAP_INTERVAL_S)
    after = _read_swapped_bytes(root)
    if before is None or after is None:
        return None
    return round((after - before) / (time.monotonic() - began))


def _read_swapped_bytes(root: str) -> int | None:
    pages = re.findall(r"^pswp(?:in|out) (\d+)", kernel_files.read_text(root, "/proc/vmstat") or "", re.MULTILINE)
    return sum(map(int, pages)) * os.sysconf("SC_PAGE_SIZE") if pages else None


_CPU_FOLDER = "/sys/devices/system/cpu"
_MAX_PREFERENCES = 16
"""The maximum number of processors whose preference (between speed and power) is read. A reading may cost an interrupt,
and usually all processors have the same preference.
"""


def collect_processors(root: str) -> dict[str, Any]:
    """Return the facts about processors and clocks, for the group `host`."""
    processors = [
        name for name in kernel_files.list_names(root, _CPU_FOLDER) if name.startswith("cpu") and name[3:].isdigit()
    ]
    first = f"{_CPU_FOLDER}/{processors[0]}/cpufreq" if processors else ""
    return {
        "load1": read_first_number(kernel_files.read_text(root, "/proc/loadavg")),
        "governors": _count_values(root, processors, "scaling_governor"),
        "frequency_driver": kernel_files.read_text(root, f"{first}/scaling_driver") if first else None,
        "preferences": _count_values(root, processors[:_MAX_PREFERENCES], "energy_performance_preference"),
        "clocksource": kernel_files.read_text(root, "/sys/devices/system/clocksource/clocksource0/current_clocksource"),
        "clock_error": syscalls.read_clock_error() if root == "/" else None,
    }


def _count_values(root: str, names: list[str], file: str) -> dict[str, int]:
    values = (kernel_files.read_text(root, f"{_CPU_FOLDER}/{name}/cpufreq/{file}") for name in names)
    return dict(collections.Counter(filter(None, values)))


def read_first_number(content: str | None) -> float | None:
    """Return the first word of a file's content as a number, or `None` if the word is not a number."""
    try:
        return float((content or "").split()[0])
    except (IndexError, ValueError):
        return None


try:
    # The import of `hashlib` would load OpenSSL.
    from _blake2 import blake2b
except ImportError:
    from hashlib import blake2b


_VARIABLE_PREFIXES = (
    *("NCCL_", "GLOO_", "TP_", "CUDA_", "NVIDIA_", "OMP_", "TORCH_", "UCX_", "FI_", "COMPUTE_PROFILE", "NSIGHT_"),
    *("HIP_", "ROCR_", "HSA_", "GPU_DEVICE_ORDINAL"),
)
_LOADER_VARIABLES = ("LD_LIBRARY_PATH", "LD_PRELOAD")
_PLAIN_VARIABLES = (
    *("_SOCKET_IFNAME", "_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "NCCL_IB_HCA", "NCCL_NET", "NCCL_NET_PLUGIN"),
    *("NCCL_ALGO", "NCCL_PROTO"),
)
"""The suffixes of environment variables whose values are reported. Health checks need these values, which are not
secret.
"""
_HASH_BYTES = 6


def collect_environment(root: str, salt: str = "") -> dict[str, Any]:
    """Return the facts about environment variables, for the group `host`.

    Args:
        root: The prefix of `/etc`.
        salt: A text that is hashed with each value, so hashes are comparable only within one check of the cluster.
    """
    own = os.environ.get("NCCL_CONF_FILE") or os.path.expanduser("~/.nccl.conf")
    variables = {
        **logind_and_nccl_files.read_nccl_conf([kernel_files.join_root(root, "/etc/nccl.conf"), own]),
        **{k: v for k, v in os.environ.items() if k.startswith(_VARIABLE_PREFIXES) or k in _LOADER_VARIABLES},
    }
    return {
        "env": {
            name: value if name.endswith(_PLAIN_VARIABLES) or value.isdigit() else None
            for name, value in variables.items()
        },
        "env_hashes": {name: _hash_variable(salt, name, value) for name, value in variables.items()},
    }


def _hash_variable(salt: str, name: str, value: str) -> str:
    home = os.path.expanduser("~")
    plain = value.replace(home, "~") if len(home) > 1 else value
    text = f"{salt}\0{name}\0{plain}".encode("utf-8", "surrogateescape")
    return str(blake2b(text, digest_size=_HASH_BYTES).hexdigest())


def collect_host(root: str, variable_salt: str = "") -> dict[str, Any]:
    """Return the facts of the group `host`. `variable_salt` is hashed with each environment variable."""
    distro = re.search(r'^PRETTY_NAME="?([^"\n]*)', kernel_files.read_text(root, "/etc/os-release") or "", re.MULTILINE)
    return {
        "boot_id": kernel_files.read_text(root, "/proc/sys/kernel/random/boot_id"),
        "machine_id": kernel_files.read_text(root, "/etc/machine-id"),
        "netns": proc.read_namespace("net") or None,
        "kernel": os.uname().release,
        "arch": os.uname().machine,
        "distro": distro.group(1) if distro else None,
        "user": os.environ.get("USER") or str(os.getuid()),
        "uptime": read_first_number(kernel_files.read_text(root, "/proc/uptime")),
        **collect_memory(root),
        **collect_processors(root),
        **collect_limits(root),
        **collect_environment(root, variable_salt),
    }


_LIBRARY_FOLDERS = ("/lib64", "/usr/lib64", "/lib", "/usr/lib", "/usr/local/lib")


def find_library(name: str, root: str = "/", *, prefix: str | None = None) -> str | None:
    """Return the path of a shared library, or `None`.

    The search goes through LD_LIBRARY_PATH, the `lib` folder of this Python, the loader's cache and the usual folders.
    """
    listed = [place for place in os.environ.get("LD_LIBRARY_PATH", "").split(":") if place]
    own = os.path.join(sys.prefix if prefix is None else prefix, "lib")
    for place in [*listed, own]:
        if os.path.exists(kernel_files.join_root(root, f"{place}/{name}")):
            return f"{place.rstrip('/')}/{name}"
    usual = (f"{folder}/{name}" for folder in _LIBRARY_FOLDERS)
    existing = (path for path in usual if os.path.exists(kernel_files.join_root(root, path)))
    return _find_cached_library(name, root) or next(existing, None)


def _find_cached_library(name: str, root: str) -> str | None:
    """Return the path of a library from `/etc/ld.so.cache` (ldconfig(8)). Each string ends in a zero byte."""
    data = kernel_files.read_bytes_or_none(kernel_files.join_root(root, "/etc/ld.so.cache")) or b""
    end = data.find(f"/{name}\0".encode())
    if end < 0:
        return None
    path = data[data.rfind(b"\0", 0, end) + 1 : data.index(b"\0", end)].decode("utf-8", "surrogateescape")
    return path if os.path.exists(kernel_files.join_root(root, path)) else None


_REPORTED_PACKAGES = (
    *("torch", "keras", "tensorflow", "tensorflow-cpu", "jax", "jaxlib", "numpy", "transformers", "triton"),
    *("flash-attn", "deepspeed", "lightning"),
)
_JAX_CUDA = re.compile(r"jax-cuda\d+-plugin$")
"""Matches the names of packages that show the CUDA version of JAX. The package `jax` does not show this version."""
_NCCL_PACKAGE = re.compile(r"nvidia-nccl-cu\d+$")
_NCCL_FILE = re.compile(r"libnccl\.so\.(\d+\.\d+\.\d+)$")
_TORCH_BUILD_LINE = r"^{}(?:\s*:[^=]*)?\s*=\s*['\"]([\d.]+)[^'\"]*['\"]"
"""Matches the line with the CUDA or HIP version in `torch/version.py`."""


def collect_versions(root: str = "/") -> dict[str, Any]:
    """Return the facts of the group `versions`. `root` is the prefix of the machine's libraries."""
    packages, places = _list_packages()
    listing = "\n".join(f"{name}=={packages[name]}" for name in sorted(packages)).encode()
    return {
        "python": ".".join(map(str, sys.version_info[:3])),
        "executable": sys.executable,
        "torch": packages.get("torch"),
        "torch_cuda": _read_torch_build(places.get("torch"), "cuda"),
        "torch_hip": _read_torch_build(places.get("torch"), "hip"),
        **_find_nccl(packages, root),
        "net_plugin": _find_net_plugin(root),
        "verbs": find_library("libibverbs.so.1", root) or find_library("libibverbs.so", root),
        "packages": len(packages),
        "packages_hash": f"{zlib.crc32(listing):08x}{zlib.adler32(listing):08x}",
        "names": {name: text for name, text in packages.items() if name in _REPORTED_PACKAGES or _JAX_CUDA.match(name)},
    }


def _find_nccl(packages: dict[str, str], root: str) -> dict[str, Any]:
    """Return the version and the origin of the NCCL that torch would load.

    A library in LD_PRELOAD has priority. Torch from PyPI loads NCCL from the Python package of NCCL, because the RPATH
    of torch precedes LD_LIBRARY_PATH. Without this package, as in conda and in NVIDIA's containers, the loader searches
    for the library.
    """
    preloaded = [path for path in re.split("[ :]", os.environ.get("LD_PRELOAD", "")) if "libnccl.so" in path]
    package = next((version for name, version in sorted(packages.items()) if _NCCL_PACKAGE.match(name)), None)
    if package is not None and not preloaded:
        return {"nccl": package, "nccl_from": "package"}
    path = preloaded[0] if preloaded else find_library("libnccl.so.2", root)
    if path is None:
        return {"nccl": None, "nccl_from": None}
    named = _NCCL_FILE.search(os.path.realpath(kernel_files.join_root(root, path)))
    return {"nccl": named.group(1) if named else None, "nccl_from": path}


def _find_net_plugin(root: str) -> str | None:
    """Return the network plugin that NCCL would load, such as aws-ofi-nccl, or `None`."""
    name = os.environ.get("NCCL_NET_PLUGIN", "")
    if "/" in name or name == "none":
        return name if name != "none" and os.path.exists(kernel_files.join_root(root, name)) else None
    return find_library(f"libnccl-net-{name}.so" if name else "libnccl-net.so", root)


def _list_packages() -> tuple[dict[str, str], dict[str, str]]:
    """Return the version and the folder of each package, by name.

    If two folders on `sys.path` have the package, the first one counts, as for imports.
    """
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


def _read_torch_build(place: str | None, what: str) -> str | None:
    """Return the CUDA or HIP version of torch from its file `version.py`, or `None`."""
    text = kernel_files.read_text("/", os.path.join(place, "torch", "version.py")) if place is not None else None
    built = re.search(_TORCH_BUILD_LINE.format(what), text or "", re.MULTILINE)
    return built.group(1) if built else None
