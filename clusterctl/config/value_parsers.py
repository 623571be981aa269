"""Parsers and checks of single values: durations, sizes, host names, user names and arguments of `ssh`.

Some values become arguments of `ssh`, and through ssh_config part of a shell command. Therefore the checks accept only
characters without a meaning for a shell.
"""

from __future__ import annotations

import math
import os
import pwd
import re
from pathlib import Path


class InvalidValueError(ValueError):
    """A value is not valid; `hint` is a remedy or `None`."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


def describe_value(value: object) -> str:
    """Return the description of a value for error messages."""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str):
        return f"the text `{value if len(value) <= 40 else value[:37] + '...'}`"
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "a mapping"
    return "nothing" if value is None else f"`{value}`"


_DURATION = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?(?:ms|[dhms]))+")
_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|[dhms])")
_SECONDS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_MAX_DURATION_S = 10 * 366 * 86400.0

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")
_BYTES = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base ** (power + 1)
    for power, prefix in enumerate("kmgtp")
    for suffix, base in (("b", 1000), ("ib", 1024))
}
_MAX_SIZE_BYTES = 2**60

DURATION_PATTERN = r"^([0-9]+(\.[0-9]+)?(ms|[dhms])?|([0-9]+(\.[0-9]+)?(ms|[dhms]))+)$"
SIZE_PATTERN = r"^[0-9]+(\.[0-9]+)? *(([kKmMgGtTpP][iI]?)?[bB])?$"


def parse_duration(value: object) -> float:
    """Parse `90`, `90s`, `10m`, `1h30m`, `250ms` or `2d`; return seconds.

    Raises:
        InvalidValueError: The value is not a duration, is negative, or is longer than ten years.
    """
    seconds = _parse_seconds(value)
    if seconds is None or not math.isfinite(seconds):
        raise InvalidValueError(f"{_describe_bare(value)} is not a duration", "write seconds, or `90s`, `10m`, `1h30m`")
    if seconds < 0:
        raise InvalidValueError("a duration must not be negative")
    if seconds > _MAX_DURATION_S:
        raise InvalidValueError("must not be longer than ten years", "if there should be no limit, leave the key out")
    return seconds


def _parse_seconds(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    if not isinstance(value, str):
        # A huge integer does not fit a float; any number above the maximum gives the same error.
        return _MAX_DURATION_S * 2 if value > _MAX_DURATION_S else float(value)
    if len(value) > 64:
        return None
    if _DURATION.fullmatch(value):
        return sum(float(number) * _SECONDS[unit] for number, unit in _DURATION_PART.findall(value))
    return float(value) if re.fullmatch(r"[0-9]+(\.[0-9]+)?", value) else None


def parse_size(value: object) -> int:
    """Parse `500MiB`, `10GB` or a number of bytes; return bytes.

    Raises:
        InvalidValueError: The value is not a size, is negative, or is 2**60 or more.
    """
    count = _parse_bytes(value)
    if count < 0:
        raise InvalidValueError("a size must not be negative")
    if count >= _MAX_SIZE_BYTES:
        raise InvalidValueError("must be less than 2**60 bytes")
    return count


def _parse_bytes(value: object) -> int:
    wrong = InvalidValueError(f"{_describe_bare(value)} is not a size", "write bytes, or `500MiB`, `10GB`")
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if not isinstance(value, str) or len(value) > 64:
        raise wrong
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise wrong
    number, unit = match[1], match[2].lower()
    if unit in {"k", "m", "g", "t", "p"}:
        hint = f"write `{number}{unit.upper()}B` (powers of 1000) or `{number}{unit.upper()}iB` (powers of 1024)"
        raise InvalidValueError(f"`{value}` has an ambiguous unit", hint)
    if unit not in _BYTES:
        raise wrong
    return int(float(number) * _BYTES[unit]) if "." in number else int(number) * _BYTES[unit]


def _describe_bare(value: object) -> str:
    return "`None`" if value is None else describe_value(value).removeprefix("the text ")


def format_exact_duration(seconds: float) -> str:
    """Return seconds as text that `parse_duration` parses exactly: `90.0` gives `1m30s`, `0.25` gives `250ms`."""
    if seconds != int(seconds):
        milli = round(seconds * 1000, 3)
        return f"{int(milli)}ms" if milli == int(milli) and seconds < 60 else f"{seconds:.3f}".rstrip("0") + "s"
    rest, parts = int(seconds), []
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, rest = divmod(rest, length)
        parts += [f"{count}{unit}"] if count else []
    return "".join(parts) or "0s"


def format_exact_size(count: int) -> str:
    """Return bytes in the largest unit that gives a whole number: `524288000` gives `500MiB`."""
    for unit in ("PiB", "PB", "TiB", "TB", "GiB", "GB", "MiB", "MB", "KiB", "kB"):
        if count and count % _BYTES[unit.lower()] == 0:
            return f"{count // _BYTES[unit.lower()]}{unit}"
    return f"{count}B"


_HOST = re.compile(r"\w[\w.-]{0,252}")
_SCOPE = re.compile(r"[\w.-]{1,64}")
# winbind writes user names as `DOMAIN\user`.
_USER = re.compile(r"[\w.+][\w.@+-]{0,127}(\\[\w.@+-]{1,127})?")
_FORBIDDEN_IN_PATH = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029`$;&|<>\"'\\\\]")

HOST_HINT = "letters, digits, `.`, `_` and `-`, or an IP address"
_USER_HINT = "letters, digits, `.`, `_`, `-`, `+` and `@`"
_PATH_HINT = "leave out quotes, `$`, `` ` ``, `;`, `&`, `|`, `<`, `>`, `\\` and line breaks; `~` is the home directory"

COMMAND_HINT = 'write `command: [docker, exec, -i, "{host}", /bin/sh]`; it may contain `{host}`, `{user}` and `{port}`'
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


def is_ipv6(text: str) -> bool:
    """Return whether `text` is an IPv6 address, with or without a scope (`fe80::1%eth0`)."""
    # This import is here because most cluster files contain only names and do not need `ipaddress`.
    import ipaddress

    address, percent, scope = text.partition("%")
    try:
        return ipaddress.IPv6Address(address) is not None and (not percent or bool(_SCOPE.fullmatch(scope)))
    except ValueError:
        return False


def is_host_name(text: str) -> bool:
    """Return whether `text` is a valid host name or address."""
    return bool(_HOST.fullmatch(text)) or is_ipv6(text)


def is_known_hosts_name(text: str) -> bool:
    """Return whether `text` can be a host in known_hosts: `host` or `[host]:port`."""
    bracketed = re.fullmatch(r"\[([^\]]+)\]:[0-9]{1,5}", text)
    return is_host_name(bracketed[1] if bracketed else text)


def is_user_name(text: str) -> bool:
    """Return whether `text` is a valid user name."""
    return bool(_USER.fullmatch(text))


def is_ssh_path(text: str) -> bool:
    """Return whether `text` is a path without shell metacharacters and line breaks."""
    return bool(text.strip()) and not text.startswith("-") and not _FORBIDDEN_IN_PATH.search(text)


def split_proxy_hop(text: str) -> tuple[str, str, int | None]:
    """Return user (may be empty), host and port of a hop of ProxyJump: `[ssh://][user@]host[:port]`.

    An IPv6 address with a port needs brackets. The function does not check the three parts.
    """
    rest = text.strip().removeprefix("ssh://").rstrip("/")
    user, _, place = rest.rpartition("@")
    bracketed = re.fullmatch(r"\[([^\]]+)\](?::([0-9]{1,5}))?", place)
    if bracketed:
        return user, bracketed[1], int(bracketed[2]) if bracketed[2] else None
    host, _, port = place.partition(":")
    if place.count(":") == 1 and re.fullmatch("[0-9]{1,5}", port):
        return user, host, int(port)
    return user, place, None


def is_proxy_hop(text: str) -> bool:
    """Return whether `text` is a valid hop of ProxyJump."""
    user, host, _ = split_proxy_hop(text)
    return is_host_name(host) and (not user or is_user_name(user))


def check_ssh_argument(value: object) -> object:
    """Check a word for the command line of `ssh`; return the value unchanged. A value that is not text passes.

    Raises:
        InvalidValueError: The word is empty, contains a blank, or begins with `-`.
    """
    if isinstance(value, str) and (value.startswith("-") or not value.strip() or any(c.isspace() for c in value)):
        raise InvalidValueError(f"{describe_value(value)} must not be empty, contain a blank or begin with `-`")
    return value


def check_user_name(value: object) -> object:
    """Check a user name as `check_ssh_argument` does, and check its characters."""
    if isinstance(check_ssh_argument(value), str) and not is_user_name(str(value)):
        raise InvalidValueError(f"{describe_value(value)} is not a user name", _USER_HINT)
    return value


def check_proxy_jump(value: object) -> object:
    """Check a ProxyJump as `check_ssh_argument` does, and check each hop."""
    if isinstance(check_ssh_argument(value), str):
        wrong = next((hop for hop in str(value).split(",") if not is_proxy_hop(hop)), None)
        if wrong is not None:
            raise InvalidValueError(f"{describe_value(wrong)} is not a jump host", "write `[user@]host[:port]`")
    return value


def check_ssh_path(value: object) -> object:
    """Check the path of a key file, which may contain blanks."""
    if isinstance(value, str) and not is_ssh_path(value):
        raise InvalidValueError(f"{describe_value(value)} is not allowed as the path of a key file", _PATH_HINT)
    return value


def parse_transport_command(value: object) -> tuple[str, ...]:
    """Check the command of a transport, which opens a shell on a host; return its words.

    Raises:
        InvalidValueError: The value is not a list of texts, its program is a relative path, or it lacks `{host}`.
    """
    if isinstance(value, list) and None in value:
        # Interpolation has already reported an error of this item.
        return ()
    if not isinstance(value, list) or not value or not all(isinstance(word, str) for word in value):
        raise InvalidValueError("the command must be a list of texts", COMMAND_HINT)
    if any(not word.isprintable() for word in value):
        raise InvalidValueError("the command contains a line break or a control character", COMMAND_HINT)
    program = value[0]
    if not program or program.startswith("-") or ("/" in program and not program.startswith("/")) or "{" in program:
        hint = "write a name on PATH, such as `docker`, or an absolute path"
        raise InvalidValueError(f"{describe_value(program)} is not allowed as the program of the command", hint)
    named = {name for word in value for name in find_placeholders(word)}
    strange = sorted(named - {"host", "user", "port"})
    if strange:
        raise InvalidValueError(f"the command contains `{{{strange[0]}}}`, which is not a placeholder", COMMAND_HINT)
    if "host" not in named:
        raise InvalidValueError("the command does not contain `{host}`, so all hosts would be the same", COMMAND_HINT)
    return tuple(value)


def find_placeholders(word: str) -> list[str]:
    """Return the names of the placeholders in a word of a command."""
    return _PLACEHOLDER.findall(word)


def fill_placeholders(word: str, values: dict[str, str]) -> str:
    """Replace the placeholders of a word by values; placeholders inside a value are not replaced."""
    return _PLACEHOLDER.sub(lambda found: values[found[1]], word)


def find_ssh_home() -> str:
    """Return the home directory that ssh uses for `~`: from the password database, not from $HOME."""
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return str(Path.home())
