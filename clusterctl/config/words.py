"""Words that reach `ssh`, and through its configuration a shell: which texts may stand for what.

A cluster file may come from elsewhere, and what it names is filled into `ProxyCommand` and `Match exec` of the user's
own ssh_config, as shell text. So each word is held to what it may be made of, and nothing is quoted or taken out.
"""

from __future__ import annotations

import os
import pwd
import re
from pathlib import Path

from clusterctl.config.wrong import WrongValueError, shown

_HOST = re.compile(r"\w[\w.-]{0,252}")
_SCOPE = re.compile(r"[\w.-]{1,64}")
# `DOMAIN\user` is how winbind names people.
_USER = re.compile(r"[\w.+][\w.@+-]{0,127}(\\[\w.@+-]{1,127})?")
_NOT_IN_A_PATH = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029`$;&|<>\"'\\\\]")

HOST_HINT = "letters, digits, `.`, `_` and `-`, or an IP address"
_USER_HINT = "letters, digits, `.`, `_`, `-`, `+` and `@`"
_PATH_HINT = "leave out quotes, `$`, `` ` ``, `;`, `&`, `|`, `<`, `>`, `\\` and line breaks; `~` is the home"

COMMAND_HINT = 'write `command: [docker, exec, -i, "{host}", /bin/sh]`; there are `{host}`, `{user}` and `{port}`'
_FILLED_IN = re.compile(r"\{(\w+)\}")


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


def command(value: object) -> tuple[str, ...]:
    """Check a command that leads to a shell on a host, and return its words.

    Raises:
        WrongValueError: It is no list of texts, is not found the same way from every folder, or names no host.
    """
    if isinstance(value, list) and None in value:
        # What could not be filled in has been told already.
        return ()
    if not isinstance(value, list) or not value or not all(isinstance(word, str) for word in value):
        raise WrongValueError("the command must be a list of texts", COMMAND_HINT)
    if any(not word.isprintable() for word in value):
        raise WrongValueError("the command holds a line break or a control character", COMMAND_HINT)
    program = value[0]
    if not program or program.startswith("-") or ("/" in program and not program.startswith("/")) or "{" in program:
        hint = "name it as on the command line (`docker`), or by its whole path"
        raise WrongValueError(f"{shown(program)} cannot be the program of the command", hint)
    named = {name for word in value for name in placeholders(word)}
    strange = sorted(named - {"host", "user", "port"})
    if strange:
        raise WrongValueError(f"the command names `{{{strange[0]}}}`, which nothing fills in", COMMAND_HINT)
    if "host" not in named:
        raise WrongValueError("the command does not name `{host}`: it would lead every host to one place", COMMAND_HINT)
    return tuple(value)


def placeholders(word: str) -> list[str]:
    """Return the names that are filled into a word of a command."""
    return _FILLED_IN.findall(word)


def filled(word: str, values: dict[str, str]) -> str:
    """Fill a word of a command in; what a value holds is never filled in again."""
    return _FILLED_IN.sub(lambda found: values[found[1]], word)


def home() -> str:
    """Return the folder that `~` is for ssh: it goes by the password database, not by $HOME."""
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return str(Path.home())
