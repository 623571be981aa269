"""Replaces names, addresses, serial numbers and folders in facts, so that they do not identify the machines.

No function does I/O. Equal values get equal replacements. Values on which findings depend are not replaced: models,
versions, numbers, PCI addresses, names of programs and packages.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_NAME_KEYS = {
    "hostname": "host",
    "user": "user",
    "serial": "serial",
    "host_key": "hostkey",
    "run": "run",
    "own_run": "run",
    "live_runs": "run",
    "strange_runs": "run",
    "rebooted_under": "run",
}
"""Key of a name to the word that replaces the name. A number follows the word, as in `host1`."""
_NODE_KEYED = ("peers", "routes")
"""Keys whose value is an object with node names as keys."""
_ENUM_KEYS = (
    *("status", "state", "vendor", "kind", "what", "role", "fs", "phys", "link_layer", "operstate", "access", "grade"),
    *("class", "clocksource", "source", "time_daemon", "arch", "modules"),
)
"""Keys whose value is one of a few fixed words. Such a word is not replaced, even if a node has the same name."""
_VERSION_KEYS = ("versions", "nvml", "driver", "module", "proc_version", "firmware", "vbios", "kernel", "version")
"""Keys whose values are versions. In these values, four numbers with dots are no IPv4 address."""
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH", re.IGNORECASE)
_HIDDEN = "***"
_COMMON_NAMES = ("root", "localhost")
"""Names that are not replaced: they exist on every machine, so they identify no machine."""
_MIN_LENGTH = 3
"""Minimum number of characters of a name that is replaced inside texts."""

_SYSTEM_FOLDERS = ("dev", "proc", "sys", "usr", "lib", "lib64", "bin", "sbin", "boot")
"""Folders that are the same on every machine."""
_COMMON_FOLDERS = re.compile(
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
"""Kind of identifying values to the pattern of these values."""


class Anonymizer:
    """Replaces identifying names in any JSON value.

    Args:
        nodes: Names of the nodes, in order of node rank.
        extra_names: Further names that may occur in texts, such as the addresses of the nodes.
        facts: The facts to anonymise. The constructor collects user names, host names and serial numbers from these
            facts.
    """

    def __init__(self, nodes: Iterable[str], extra_names: Iterable[str], facts: Any) -> None:
        self._counts: dict[str, int] = {}
        self._replacements: dict[tuple[str, str], str] = {}
        self._names: dict[str, str] = {}
        for node in nodes:
            self._add_name(node, "node")
        for kind, name in _collect_names(facts):
            self._add_name(name, kind)
        for name in extra_names:
            self._add_name(name, "host")
        self._with_addresses, self._without = (_compile_pattern(self._names, left_out) for left_out in ((), _ADDRESSES))
        self._replacers: dict[str, Callable[[str], str]] = {
            "path": self._replace_path,
            "uuid": lambda text: self._replace_by_number("uuid", text, "00000000-0000-4000-8000-{:012x}"),
            "hex": lambda text: self._replace_by_number("hex", text, "{:016x}" if len(text) == 16 else "{:032x}"),
            "v4": self._replace_ipv4,
            "v6": self._replace_ipv6,
            "name": self._replace_name,
        }

    def anonymize(self, value: Any, key: str = "", *, addresses: bool = True) -> Any:
        """Return a JSON value with all identifying names replaced.

        Args:
            value: Any JSON value.
            key: The key of the value in its object.
            addresses: Treat four numbers with dots as an IPv4 address.
        """
        addresses = addresses and key not in _VERSION_KEYS
        if isinstance(value, dict):
            by_node = key in _NODE_KEYED
            return {
                self.anonymize_text(name) if by_node else name: _HIDDEN
                if isinstance(inner, str) and _SECRET.search(name)
                else self.anonymize(inner, name, addresses=addresses)
                for name, inner in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.anonymize(inner, key, addresses=addresses) for inner in value]
        if not isinstance(value, str) or key in _ENUM_KEYS:
            return value
        return self._names.get(value, value) if key in _NAME_KEYS else self.anonymize_text(value, addresses=addresses)

    def anonymize_text(self, text: str, *, addresses: bool = True) -> str:
        """Return a text with all identifying names replaced."""
        pattern = self._with_addresses if addresses else self._without
        return pattern.sub(lambda found: self._replacers[found.lastgroup or "name"](found.group()), text)

    def _add_name(self, name: str, kind: str) -> None:
        plain = name in _COMMON_NAMES or (name.isdigit() and kind != "serial")
        if not plain and name not in self._names:
            self._names[name] = self._replace_by_number(kind, name, f"{kind}{{}}")

    def _replace_name(self, text: str) -> str:
        if text in self._names:
            return self._names[text]
        # The text is a known name with a domain.
        return self._names[max((name for name in self._names if text.startswith(f"{name}.")), key=len)]

    def _replace_by_number(self, kind: str, text: str, form: str) -> str:
        if not text.strip("0-"):
            return text
        if (kind, text) not in self._replacements:
            number = self._counts[kind] = self._counts.get(kind, 0) + 1
            self._replacements[kind, text] = form.format(number)
        return self._replacements[kind, text]

    def _replace_path(self, text: str) -> str:
        head, *parts = text.split("/")
        if parts[0] in _SYSTEM_FOLDERS and parts[:2] != ["dev", "mapper"]:
            return text
        return "/".join([head, *(self._replace_part(part) for part in parts)])

    def _replace_part(self, part: str) -> str:
        usual = not part or _COMMON_FOLDERS.fullmatch(part) or part in _SYSTEM_FOLDERS
        return part if usual else self._replace_by_number("folder", part, "folder{}")

    def _replace_ipv4(self, text: str) -> str:
        address = _parse_address(text)
        if address is None or address.is_loopback or address.is_unspecified:
            return text
        number = int(self._replace_by_number("v4", text, "{}"))
        own = "169.254" if address.is_link_local else "10.0"
        return f"{own}.{number >> 8}.{number & 0xFF}"

    def _replace_ipv6(self, text: str) -> str:
        address = _parse_address(text)
        if address is not None:
            if address.is_loopback or address.is_unspecified:
                return text
            return self._replace_by_number("v6", text, "fe80::{:x}" if address.is_link_local else "fd00::{:x}")
        groups = text.split(":")
        alike = {len(group) for group in groups}
        # Hardware addresses have 6 bytes (Ethernet), 20 bytes (InfiniBand), or four numbers (an InfiniBand port).
        if (alike == {2} and len(groups) in (6, 8, 20)) or (alike == {4} and len(groups) == 4):
            return self._replace_by_number("card", text, "02:00:00:00:00:{:02x}")
        return text


def _compile_pattern(names: Iterable[str], left_out: Iterable[str]) -> re.Pattern[str]:
    parts = [f"(?P<{kind}>{form})" for kind, form in _PATTERNS.items() if kind not in left_out]
    patterns = sorted((re.escape(name) for name in names if len(name) >= _MIN_LENGTH), key=len, reverse=True)
    if patterns:
        parts.append(rf"(?P<name>(?<![\w.-])(?:{'|'.join(patterns)}){_DOMAIN}(?![\w-]))")
    return re.compile("|".join(parts))


def _parse_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _collect_names(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the identifying names in facts, each with its kind as `(kind, name)`."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _collect_names(inner, name)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _collect_names(inner, key)
    elif isinstance(value, str) and value:
        if key in _NAME_KEYS:
            yield _NAME_KEYS[key], value
        mount = _HOST_OF_MOUNT.match(value) if key == "device" else None
        host = mount.group(1) if mount else value if key == "hostname" else ""
        yield from (("host", name) for name in (host, host.partition(".")[0]) if name)
