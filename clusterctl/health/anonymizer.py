"""Replaces names, addresses, serial numbers and folders in facts, so that they do not identify the machines. Pure.

Each name is replaced by a stand-in, the same one everywhere, so that equal values stay equal. Everything that a verdict
depends on stays: models, versions, numbers, PCI addresses, names of programs and packages.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_TELLING = {
    "hostname": "host",
    "user": "user",
    "serial": "serial",
    "run": "run",
    "own_run": "run",
    "live_runs": "run",
    "strange_runs": "run",
    "rebooted_under": "run",
}
"""Keys whose value is a name, mapped to the word that replaces it (a number is added)."""
_BY_NODE = ("peers", "routes")
"""Keys of objects whose own keys are node names."""
_WORDS = (
    *("status", "state", "vendor", "kind", "what", "role", "fs", "phys", "link_layer", "operstate", "access", "grade"),
    *("class", "clocksource", "source", "time_daemon", "arch", "modules"),
)
"""Keys whose value is one of a few words, which may also be the name of a node."""
_VERSIONS = ("versions", "nvml", "driver", "module", "proc_version", "firmware", "vbios", "kernel", "version")
"""Keys below which four numbers with dots are a version, not an address."""
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH", re.IGNORECASE)
_HIDDEN = "***"
_PLAIN = ("root", "localhost")
"""Values that every machine has. They identify nobody and stay."""
_LEAST = 3
"""Names with fewer letters are not searched for in texts."""

_SYSTEM = ("dev", "proc", "sys", "usr", "lib", "lib64", "bin", "sbin", "boot")
"""Folders that are the same on every machine."""
_USUAL = re.compile(
    r"home|root|tmp|var|run|etc|opt|srv|mnt|media|data|scratch|work|shm|nfs|lustre|bin|\.?venv|python[\d.]*"
)
_HOST_OF_MOUNT = re.compile(r"^(?://)?([A-Za-z][\w.-]*)(?=:/|/|@)")
_DOMAIN = r"(?:\.[A-Za-z][\w-]*)*"
_ADDRESSES = ("v4", "v6")
_PATTERNS = {
    "path": r"(?<![\w/.-])/[^\s'\",;:()\[\]{}<>|]*\w",
    "uuid": r"(?<![0-9a-fA-F])[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}(?![0-9a-fA-F])",
    "hex": r"(?<![0-9a-zA-Z])(?:[0-9a-f]{32,}|[0-9a-f]{16})(?![0-9a-zA-Z])",
    "v4": r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.])",
    "v6": r"(?<![\w:.])[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){2,19}(?![\w:])",
}
"""Identifying values that are recognised by their form."""


class Anonymizer:
    """Replaces identifying names in any JSON value.

    Args:
        nodes: Names of the nodes, in order.
        more: Further names that may appear in texts, such as the addresses of the nodes.
        facts: Everything that will be anonymised; the other names are collected from it.
    """

    def __init__(self, nodes: Iterable[str], more: Iterable[str], facts: Any) -> None:
        self._counts: dict[str, int] = {}
        self._made: dict[tuple[str, str], str] = {}
        self._names: dict[str, str] = {}
        for node in nodes:
            self._add(node, "node")
        for kind, name in _telling(facts):
            self._add(name, kind)
        for name in more:
            self._add(name, "host")
        self._with_addresses, self._without = (_pattern(self._names, left_out) for left_out in ((), _ADDRESSES))
        self._replace: dict[str, Callable[[str], str]] = {
            "path": self._path,
            "uuid": lambda text: self._numbered("uuid", text, "00000000-0000-4000-8000-{:012x}"),
            "hex": lambda text: self._numbered("hex", text, "{:016x}" if len(text) == 16 else "{:032x}"),
            "v4": self._v4,
            "v6": self._v6,
            "name": self._name,
        }

    def anonymize(self, value: Any, key: str = "", *, addresses: bool = True) -> Any:
        """Return `value` without identifying names.

        Args:
            value: Any JSON value.
            key: The key of the value in its object.
            addresses: Whether four numbers with dots are an address.
        """
        addresses = addresses and key not in _VERSIONS
        if isinstance(value, dict):
            by_node = key in _BY_NODE
            return {
                self.anonymize_text(name) if by_node else name: _HIDDEN
                if isinstance(inner, str) and _SECRET.search(name)
                else self.anonymize(inner, name, addresses=addresses)
                for name, inner in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.anonymize(inner, key, addresses=addresses) for inner in value]
        if not isinstance(value, str) or key in _WORDS:
            return value
        return self._names.get(value, value) if key in _TELLING else self.anonymize_text(value, addresses=addresses)

    def anonymize_text(self, text: str, *, addresses: bool = True) -> str:
        """Return a text without identifying names."""
        pattern = self._with_addresses if addresses else self._without
        return pattern.sub(lambda found: self._replace[found.lastgroup or "name"](found.group()), text)

    # --- one method per kind

    def _add(self, name: str, kind: str) -> None:
        plain = name in _PLAIN or (name.isdigit() and kind != "serial")
        if not plain and name not in self._names:
            self._names[name] = self._numbered(kind, name, f"{kind}{{}}")

    def _name(self, text: str) -> str:
        if text in self._names:
            return self._names[text]
        # A name with a domain.
        return self._names[max((name for name in self._names if text.startswith(f"{name}.")), key=len)]

    def _numbered(self, kind: str, text: str, form: str) -> str:
        if not text.strip("0-"):
            return text
        if (kind, text) not in self._made:
            number = self._counts[kind] = self._counts.get(kind, 0) + 1
            self._made[kind, text] = form.format(number)
        return self._made[kind, text]

    def _path(self, text: str) -> str:
        head, *parts = text.split("/")
        if parts[0] in _SYSTEM and parts[:2] != ["dev", "mapper"]:
            return text
        return "/".join([head, *(self._part(part) for part in parts)])

    def _part(self, part: str) -> str:
        usual = not part or _USUAL.fullmatch(part) or part in _SYSTEM
        return part if usual else self._numbered("folder", part, "folder{}")

    def _v4(self, text: str) -> str:
        address = _address(text)
        if address is None or address.is_loopback or address.is_unspecified:
            return text
        number = int(self._numbered("v4", text, "{}"))
        own = "169.254" if address.is_link_local else "10.0"
        return f"{own}.{number >> 8}.{number & 0xFF}"

    def _v6(self, text: str) -> str:
        address = _address(text)
        if address is not None:
            if address.is_loopback or address.is_unspecified:
                return text
            return self._numbered("v6", text, "fe80::{:x}" if address.is_link_local else "fd00::{:x}")
        groups = text.split(":")
        alike = {len(group) for group in groups}
        # Hardware addresses: six bytes (Ethernet), twenty bytes (InfiniBand), and the four numbers of an InfiniBand
        # port.
        if (alike == {2} and len(groups) in (6, 8, 20)) or (alike == {4} and len(groups) == 4):
            return self._numbered("card", text, "02:00:00:00:00:{:02x}")
        return text


def _pattern(names: Iterable[str], left_out: Iterable[str]) -> re.Pattern[str]:
    parts = [f"(?P<{kind}>{form})" for kind, form in _PATTERNS.items() if kind not in left_out]
    patterns = sorted((re.escape(name) for name in names if len(name) >= _LEAST), key=len, reverse=True)
    if patterns:
        parts.append(rf"(?P<name>(?<![\w.-])(?:{'|'.join(patterns)}){_DOMAIN}(?![\w-]))")
    return re.compile("|".join(parts))


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _telling(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the identifying names in facts as `(kind, name)`."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _telling(inner, name)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _telling(inner, key)
    elif isinstance(value, str) and value:
        if key in _TELLING:
            yield _TELLING[key], value
        mount = _HOST_OF_MOUNT.match(value) if key == "device" else None
        host = mount.group(1) if mount else value if key == "hostname" else ""
        yield from (("host", name) for name in (host, host.partition(".")[0]) if name)
