"""The text of a node's files: accounts, sshd's configuration, start files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.lab.keys import hash_password
from tests.lab.spec import NOISE, NodeSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

CONFIG: Final = "/run/lab/sshd_config"
HOST_KEY: Final = "/run/lab/host_key"
LOG: Final = "/run/lab/sshd.log"
FAKETIME: Final = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1"


def sshd_argv(spec: NodeSpec) -> list[str]:
    """How sshd is started on a node."""
    limits = [f"--{name}={value}" for name, value in spec.limits.items()]
    return [*(["prlimit", *limits] if limits else []), "/usr/sbin/sshd", "-f", CONFIG, "-E", LOG]


def sshd_config(spec: NodeSpec, skew: float, first: Sequence[str], host_key: str, seen: Path | None = None) -> str:
    """The node's sshd_config; `seen` is where the host key can be looked at, for its certificate."""
    certified = spec.host_certificate if seen is None else seen.with_name(seen.name + "-cert.pub").exists()
    lines = [
        *first,
        *spec.sshd,
        f"Port {spec.port}",
        f"ListenAddress {'::' if spec.ipv6_only else '0.0.0.0'}",
        f"HostKey {host_key}",
        *([f"HostCertificate {host_key}-cert.pub"] if certified else []),
        *(["TrustedUserCAKeys /run/lab/user_ca.pub"] if spec.user_ca else []),
        "PidFile /run/sshd.pid",
        "UsePAM no",
        "PermitRootLogin yes",
        f"PasswordAuthentication {'yes' if spec.password else 'no'}",
        "KbdInteractiveAuthentication no",
        "AuthorizedKeysFile .ssh/authorized_keys",
        "MaxStartups 1000:30:2000",
        "MaxSessions 1000",
        "LogLevel VERBOSE",
        "PrintLastLog no",
        "Subsystem sftp internal-sftp",
        *_set_env(spec, skew),
    ]
    return "\n".join(lines) + "\n"


def _set_env(spec: NodeSpec, skew: float) -> list[str]:
    env = dict(spec.env)
    if skew:
        preload = f"{FAKETIME}:{env['LD_PRELOAD']}" if "LD_PRELOAD" in env else FAKETIME
        env |= {"LD_PRELOAD": preload, "FAKETIME": f"{skew:+g}s", "DONT_FAKE_MONOTONIC": "1"}
    # Only the first SetEnv of a configuration counts.
    return ["SetEnv " + " ".join(f'"{name}={value}"' for name, value in env.items())] if env else []


def etc(spec: NodeSpec, hostname: str, boot_id: str) -> dict[str, str]:
    """The files of /etc that make the machine this one."""
    keep = [line for line in Path("/etc/passwd").read_text().splitlines() if line.partition(":")[0] not in
            {"root", spec.user}]  # fmt: skip
    accounts = [f"root:x:0:0:root:/root:{spec.shell}"]
    groups = Path("/etc/group").read_text()
    if spec.user != "root":
        accounts.append(f"{spec.user}:x:{spec.uid}:{spec.uid}::{spec.home}:{spec.shell}")
        groups += f"{spec.user}:x:{spec.uid}:\n"
    secret = hash_password(spec.password) if spec.password else "*"
    names = ["root", *([spec.user] if spec.user != "root" else [])]
    shadow = "".join(f"{name}:{secret if name == spec.user else '*'}:19000:0:99999:7:::\n" for name in names)
    return {
        "/etc/hosts": hosts(hostname, ipv6=spec.ipv6_only),
        "/etc/hostname": f"{hostname}\n",
        "/etc/machine-id": boot_id.replace("-", "")[::-1] + "\n",
        "/etc/resolv.conf": "",
        "/etc/passwd": "\n".join([*accounts, *keep]) + "\n",
        "/etc/group": groups,
        "/etc/shadow": shadow,
    }


def hosts(hostname: str, *, ipv6: bool) -> str:
    """What a machine's /etc/hosts says of itself; Debian's installer maps its name to a loopback address."""
    loopback = "127.0.0.1\tlocalhost\n" + ("::1\tlocalhost\n" if ipv6 else "")
    return f"{loopback}127.0.1.1\t{hostname}\n"


def noise() -> dict[str, str]:
    """Start files that print, below the home."""
    sh = f"echo '{NOISE}'\necho '{NOISE}' >&2\n"
    csh = f"echo '{NOISE}'\nsh -c 'echo noise of csh >&2'\n"
    return {".bashrc": sh, ".profile": sh, ".cshrc": csh, ".config/fish/config.fish": sh, ".zshenv": sh}
