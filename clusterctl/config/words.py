"""Words that reach `ssh`, and through its configuration a shell: which texts may stand for what.

A cluster file may come from elsewhere, and what it names is filled into `ProxyCommand` and `Match exec` of the user's
own ssh_config, as shell text. So each word is held to what it may be made of, and nothing is quoted or taken out.
"""

from __future__ import annotations

import re

from clusterctl.config.wrong import WrongValueError, shown

_HOST = re.compile(r"\w[\w.-]{0,252}")
_SCOPE = re.compile(r"[\w.-]{1,64}")
# `DOMAIN\user` is how winbind names people.
_USER = re.compile(r"[\w.+][\w.@+-]{0,127}(\\[\w.@+-]{1,127})?")
_NOT_IN_A_PATH = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029`$;&|<>\"'\\\\]")

HOST_HINT = "letters, digits, `.`, `_` and `-`, or an IP address"
_USER_HINT = "letters, digits, `.`, `_`, `-`, `+` and `@`"
_PATH_HINT = "leave out quotes, `$`, `` ` ``, `;`, `&`, `|`, `<`, `>`, `\\` and line breaks; `~` is the home"


def is_ipv6(text: str) -> bool:
    """Tell whether `text` is an IPv6 address; a scope (`fe80::1%eth0`) may follow it."""
    # Most files have names alone.
    import ipaddress

    address, percent, scope = text.partition("%")
    try:
        return ipaddress.IPv6Address(address) is not None and (not percent or bool(_SCOPE.fullmatch(scope)))
    except ValueError:
        return False


def is_host(text: str) -> bool:
    """Tell whether `text` can be the name or the address of a host, and nothing else."""
    return bool(_HOST.fullmatch(text)) or is_ipv6(text)


def is_known_name(text: str) -> bool:
    """Tell whether `text` is what a host key may be filed under: a host, or `[host]:port`."""
    bracketed = re.fullmatch(r"\[([^\]]+)\]:[0-9]{1,5}", text)
    return is_host(bracketed[1] if bracketed else text)


def is_user(text: str) -> bool:
    """Tell whether `text` can be the name of a user, and nothing else."""
    return bool(_USER.fullmatch(text))


def is_path(text: str) -> bool:
    """Tell whether `text` is a path without characters that a shell, or a list of lines, takes for its own."""
    return bool(text.strip()) and not text.startswith("-") and not _NOT_IN_A_PATH.search(text)


def split_hop(text: str) -> tuple[str, str, int | None]:
    """Return user (or nothing), host and port of a hop of ProxyJump: `[ssh://][user@]host[:port]`.

    An IPv6 address stands in brackets where a port follows it. What is returned is not checked.
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


def is_hop(text: str) -> bool:
    """Tell whether `text` is one hop of ProxyJump, and nothing else."""
    user, host, _ = split_hop(text)
    return is_host(host) and (not user or is_user(user))


def argument(value: object) -> object:
    """Check a word that stands on the command line of `ssh`; what is no text is left to pydantic.

    Raises:
        WrongValueError: It is empty, holds a blank, or would be an option.
    """
    if isinstance(value, str) and (value.startswith("-") or not value.strip() or any(c.isspace() for c in value)):
        raise WrongValueError(f"{shown(value)} cannot be used: it is empty, holds a blank, or begins with `-`")
    return value


def user(value: object) -> object:
    """Check the name of a user (see `argument`)."""
    if isinstance(argument(value), str) and not is_user(str(value)):
        raise WrongValueError(f"{shown(value)} is not the name of a user", _USER_HINT)
    return value


def hops(value: object) -> object:
    """Check the hops of a ProxyJump (see `argument`)."""
    if isinstance(argument(value), str):
        wrong = next((hop for hop in str(value).split(",") if not is_hop(hop)), None)
        if wrong is not None:
            raise WrongValueError(f"{shown(wrong)} is not a host to connect through", "write `[user@]host[:port]`")
    return value


def path(value: object) -> object:
    """Check the path of a file of keys (see `argument`; it may hold blanks)."""
    if isinstance(value, str) and not is_path(value):
        raise WrongValueError(f"{shown(value)} cannot be the path of a file of keys", _PATH_HINT)
    return value
