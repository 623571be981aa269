"""What the environment of a worker says to NCCL, CUDA and the loader: the names, and of most values only a hash.

NCCL takes what the environment does not say from `nccl.conf` (NVIDIA's NCCL user guide, environment variables).
"""

from __future__ import annotations

import os

from clusterctl.agent.linux import paths

try:
    # `hashlib` would load OpenSSL for it.
    from _blake2 import blake2b
except ImportError:
    from hashlib import blake2b

TYPE_CHECKING = False
if TYPE_CHECKING:
    from clusterctl.agent.protocol.types.found import host as shapes

_PREFIXES = (
    *("NCCL_", "GLOO_", "TP_", "CUDA_", "NVIDIA_", "OMP_", "TORCH_", "UCX_", "FI_", "COMPUTE_PROFILE", "NSIGHT_"),
    *("HIP_", "ROCR_", "HSA_", "GPU_DEVICE_ORDINAL"),
)
_LOADER = ("LD_LIBRARY_PATH", "LD_PRELOAD")
_PLAIN = (
    *(
        "_SOCKET_IFNAME",
        "_VISIBLE_DEVICES",
        "GPU_DEVICE_ORDINAL",
        "NCCL_IB_HCA",
        "NCCL_NET",
        "NCCL_NET_PLUGIN",
        "NCCL_ALGO",
    ),
    "NCCL_PROTO",
)
"""How names end whose values are told as they are: they are judged by themselves, and hide nothing."""
_BYTES = 6


def collect(root: str, salt: str = "") -> shapes.Environment:
    """Return the environment's part of the group `host`.

    Args:
        root: Prefix of `/etc`.
        salt: Goes into each hash, so that hashes of one look can be compared with each other and with nothing else.
    """
    variables = {**_conf(root), **{k: v for k, v in os.environ.items() if k.startswith(_PREFIXES) or k in _LOADER}}
    return {
        "env": {name: value if _is_plain(name, value) else None for name, value in variables.items()},
        "env_hashes": {name: _hash(salt, name, value) for name, value in variables.items()},
    }


def _is_plain(name: str, value: str) -> bool:
    return name.endswith(_PLAIN) or value.isdigit()


def _conf(root: str) -> dict[str, str]:
    """Return what the files of NCCL say; that of the user, or the one that the environment names, has the last word."""
    own = os.environ.get("NCCL_CONF_FILE") or os.path.expanduser("~/.nccl.conf")
    values: dict[str, str] = {}
    for path in (paths.under(root, "/etc/nccl.conf"), own):
        for line in (paths.content(path) or b"").decode("utf-8", "replace").splitlines():
            name, equals, value = line.strip().partition("=")
            if equals and name.startswith("NCCL_"):
                values[name] = value.strip()
    return values


def _hash(salt: str, name: str, value: str) -> str:
    home = os.path.expanduser("~")
    plain = value.replace(home, "~") if len(home) > 1 else value
    return str(blake2b(f"{salt}\0{name}\0{plain}".encode("utf-8", "surrogateescape"), digest_size=_BYTES).hexdigest())
