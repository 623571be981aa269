"""Arguments of `ssh`, as other tools keep them, put into keys of a host of a cluster file."""

from __future__ import annotations

import os
import re
import shlex

_KEYS = {
    "proxyjump": "proxy_jump",
    "port": "port",
    "user": "user",
    "identityfile": "identity_file",
    "hostname": "address",
}
_OPTIONS = {"-J": "proxyjump", "-p": "port", "-l": "user", "-i": "identityfile"}
# They change neither where a login leads nor who logs in.
_WITHOUT_EFFECT = frozenset(
    {
        *("controlmaster", "controlpersist", "controlpath", "serveraliveinterval", "serveralivecountmax", "loglevel"),
        *("connecttimeout", "connectionattempts", "compression", "batchmode", "tcpkeepalive", "requesttty"),
    }
)
_FLAGS = frozenset({"-C", "-q", "-T", "-x", "-n", "-tt", "-t"})


def read(text: str) -> dict[str, str]:
    """Return the keys of a host that say the same as arguments of ssh.

    Raises:
        ValueError: One of them says what no key can, or is not known here.
    """
    found, rest = _read(shlex.split(text))
    if rest:
        raise ValueError(f"`{rest[0][:60]}` is no option of ssh")
    return found


def _read(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return what options say, and the words behind them."""
    found: dict[str, str] = {}
    words = list(words)
    while words and words[0].startswith("-"):
        word = words.pop(0)
        if word in _FLAGS:
            continue
        option, value = word[:2], word[2:]
        if option not in (*_OPTIONS, "-o") or not (value or words):
            raise ValueError(f"`{word[:60]}` is an option of ssh")
        value = value or words.pop(0)
        name = _OPTIONS.get(option)
        if name is None:
            name, value = [*re.split(r"\s*=\s*|\s+", value.strip(), maxsplit=1), ""][:2]
        found.update(_of_option(name.lower(), value, f"{option} {name}" if option == "-o" else word))
    return found, words


def _of_option(name: str, value: str, shown: str) -> dict[str, str]:
    if name == "proxycommand":
        return {"proxy_jump": _jump(value)}
    if name in _KEYS:
        return {_KEYS[name]: value}
    if name in _WITHOUT_EFFECT:
        return {}
    raise ValueError(f"`{shown[:60]}` is an option of ssh")


def _jump(command: str) -> str:
    """Return the jump host of a command that goes through one, such as `ssh -W %h:%p user@bastion`."""
    shown = ValueError(f"`ProxyCommand={command[:60]}` is no jump through another host")
    words = shlex.split(command)
    if not words or os.path.basename(words[0]) != "ssh":
        raise shown
    del words[0]
    forwards = [word for word in words if word in ("-W%h:%p", "%h:%p")]
    found, rest = _read_all([word for word in words if word not in ("-W", *forwards)])
    through = bool(forwards) or [os.path.basename(word) for word in rest[1:]] in (
        ["nc", "%h", "%p"],
        ["netcat", "%h", "%p"],
    )
    if not through or len(rest) != (1 if forwards else 4) or not {"user", "port"} >= found.keys():
        raise shown
    user, _, host = rest[0].rpartition("@")
    user = found.get("user", user)
    before, behind = f"{user}@" if user else "", f":{found['port']}" if "port" in found else ""
    return f"{before}{host}{behind}"


def _read_all(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Read options on either side of a host."""
    found, rest = _read(words)
    if len(rest) > 1 and rest[1].startswith("-"):
        more, behind = _read(rest[1:])
        return {**found, **more}, [rest[0], *behind]
    return found, rest
