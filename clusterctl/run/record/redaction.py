"""Replaces secrets, addresses and names of home folders in texts that people send to others."""

from __future__ import annotations

import ipaddress
import re

_ADDRESS = re.compile(
    rb"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?!\w|\.\d)"
    rb"|(?<![\w.:])[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){2,7}(?![\w.:])"
)
_TEST_NET_SIZE = 254
_BENCHMARK_NET = ipaddress.IPv4Address("198.18.0.0")
_HOME = re.compile(rb"/(?:home|Users)/[^/\s\"':]+")
_SECRET = re.compile(
    rb"(?i)([\w-]*(?:secret|token|passw|credential|api_?key|private)[\w-]*(?:\\?[\"'])?\s*[=:]\s*)"
    rb"(\\\"(?:[^\"\\]|\\(?!\"))*\\\"|\"[^\"]*\"|'[^']*'|[^\s,}\"'\\]+)"
)
"""Matches a name that looks like a secret, and its value: quoted, quoted within a JSON string, or bare."""
_SECRET_ARGUMENT = re.compile(
    rb"(?i)(--?[\w.-]*(?:secret|token|passw|credential|api[_-]?key|private)[\w.-]*)"
    rb"(?:(\"\s*,\s*\")((?:[^\"\\]|\\.)*)(?=\")|(\s+)(?!-)[^\s\"\\]+)"
)
"""Matches an option that looks like a secret, and the word after it, in a JSON list or in a shell command."""


def redact_bytes(content: bytes, replacements: dict[bytes, bytes] | None = None) -> bytes:
    """Return a text without secrets, addresses and names of home folders. Equal addresses stay equal.

    Args:
        content: The text.
        replacements: The replacement of each address. Several texts may share this dictionary.
    """
    replacements = {} if replacements is None else replacements

    def instead(match: re.Match[bytes]) -> bytes:
        try:
            address = ipaddress.ip_address(match[0].decode())
        except ValueError:
            return match[0]
        if address.is_loopback or address.is_unspecified:
            return match[0]
        return replacements.setdefault(address.compressed.encode(), _format_replacement(len(replacements) + 1))

    content = _SECRET.sub(_mask_value, content)
    content = _SECRET_ARGUMENT.sub(lambda found: found[1] + (found[2] or found[4]) + b"***", content)
    return _HOME.sub(b"/home/user", _ADDRESS.sub(instead, content))


def _format_replacement(number: int) -> bytes:
    """Return a reserved address that no machine has. Each number gives a different address."""
    return b"192.0.2.%d" % number if number <= _TEST_NET_SIZE else str(_BENCHMARK_NET + number).encode()


def _mask_value(match: re.Match[bytes]) -> bytes:
    """Return a matched name with stars in place of its value. Quotes around the value stay, for valid JSON."""
    value = match[2]
    quote = rb"\"" if value.startswith(rb"\"") else value[:1] if value[:1] in (b'"', b"'") else b""
    return match[1] + quote + b"***" + quote
