"""Parser of host lists of other tools: Ansible inventories, ssh_config, hostfiles, Slurm node lists. Pure.

The parser recognises the format of a list by its content. The parser does not resolve templates, `group_vars` and
plugins of Ansible. The command `ansible-inventory --list --yaml` resolves them.
"""

from __future__ import annotations

import getopt
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from clusterctl.config import host_ranges as ranges
from clusterctl.config.sections.hostfiles_and_slurm import HostListError, ListedHost, parse_hostfile

IncludeReader = Callable[[str], Iterable[str]]


_SSH_HOST = re.compile(r"^\s*Host\s*[\s=](?!.*(?:slots|gpus)\s*=)", re.IGNORECASE | re.MULTILINE)
_CODE_FORGES = ("github.com", "gitlab.com", "bitbucket.org", "codeberg.org", "ssh.dev.azure.com")
"""Hosts of code repositories, which ssh_config files often contain, and which cannot run training."""


def parse_host_list(text: str, read_include: IncludeReader = lambda _: ()) -> list[ListedHost]:
    """Return the hosts of another tool's list: an ssh_config, an Ansible inventory, a hostfile or a Slurm node list.

    Args:
        text: The content of the file.
        read_include: A function that returns the texts of the files that match the pattern of an `Include` in an
            ssh_config.

    Raises:
        HostListError: The text is not valid, has no host, or has a setting that a cluster file cannot express.
    """
    text = text.removeprefix("\ufeff")
    if is_ansible_inventory(text):
        return parse_ansible_inventory(text)
    if not is_ssh_config(text):
        return parse_hostfile(text)
    names = dict.fromkeys(_list_ssh_hosts(text, read_include, depth=0))
    return [ListedHost(name) for name in names if not name.endswith(_CODE_FORGES)]


def is_ssh_config(text: str) -> bool:
    """Return whether a text looks like an ssh_config."""
    return _SSH_HOST.search(text) is not None


def _list_ssh_hosts(text: str, read_include: IncludeReader, depth: int) -> Iterator[str]:
    # ssh also stops at 16 levels of Include.
    for line in text.splitlines() if depth < 16 else ():
        words = line.replace("=", " ", 1).split()
        if len(words) < 2 or words[0].startswith("#"):
            continue
        keyword, rest = words[0].lower(), [word.strip('"') for word in words[1:]]
        if keyword == "host":
            yield from (word for word in rest if not any(c in word for c in "*?!"))
        elif keyword == "include":
            for included in (included for pattern in rest for included in read_include(pattern)):
                yield from _list_ssh_hosts(included, read_include, depth + 1)


_OPTION_KEYS = {
    "-J": "proxy_jump",
    "-p": "port",
    "-l": "user",
    "-i": "identity_file",
    "-W": "forward",
    "proxyjump": "proxy_jump",
    "port": "port",
    "user": "user",
    "identityfile": "identity_file",
    "hostname": "address",
    "proxycommand": "command",
}
_IGNORED_OPTIONS = frozenset(
    {
        *("controlmaster", "controlpersist", "controlpath", "serveraliveinterval", "serveralivecountmax", "loglevel"),
        *("connecttimeout", "connectionattempts", "compression", "batchmode", "tcpkeepalive", "requesttty"),
        *("-C", "-q", "-T", "-x", "-n", "-t"),
    }
)
"""Options of ssh that change neither the machine nor the user of a login."""


def convert_ssh_arguments_to_keys(text: str) -> dict[str, str]:
    """Convert arguments of `ssh` to keys of a host in a cluster file.

    Raises:
        ValueError: An argument is unknown, or has no equivalent key.
    """
    found, words = _parse_options(text)
    if words or "forward" in found:
        raise ValueError(f"`{next(iter(words), '-W')[:60]}` is not an option of ssh that a cluster file can express")
    command = found.pop("command", None)
    return found if command is None else {**found, "proxy_jump": _parse_jump_host(command)}


def _parse_options(text: str) -> tuple[dict[str, str], list[str]]:
    """Split a command line of `ssh` into options (by their key in the cluster file) and other words."""
    try:
        pairs, words = getopt.gnu_getopt(shlex.split(text), "J:p:l:i:W:o:CqTxnt")
    except getopt.GetoptError as error:
        raise ValueError(f"`-{error.opt[:60]}` is an unsupported option of ssh") from error
    options: dict[str, str] = {}
    for flag, argument in pairs:
        name, value, option = flag, argument, flag
        if flag == "-o":
            option, value = [*re.split(r"\s*=\s*|\s+", argument.strip(), maxsplit=1), ""][:2]
            name = option.lower()
        if name in _OPTION_KEYS:
            options[_OPTION_KEYS[name]] = value
        elif name not in _IGNORED_OPTIONS:
            raise ValueError(f"`-o {option[:60]}` is an unsupported option of ssh")
    return options, words


def _parse_jump_host(command: str) -> str:
    """Return the jump host of a command such as `ssh -W %h:%p user@bastion` or `ssh bastion nc %h %p`."""
    options, words = _parse_options(command)
    names = [os.path.basename(word) for word in words]
    is_jump = len(words) == 2 if options.pop("forward", "") == "%h:%p" else names[2:] in _NETCAT
    if names[:1] != ["ssh"] or not is_jump:
        raise ValueError(f"`ProxyCommand={command[:60]}` does not connect through a jump host")
    user, _, host = words[1].rpartition("@")
    user, port = options.pop("user", user), options.pop("port", "")
    if options:
        raise ValueError(f"`{min(options)}` of `ProxyCommand={command[:60]}` is not supported")
    return f"{user}@{host}".removeprefix("@") + (f":{port}" if port else "")


_NETCAT = (["nc", "%h", "%p"], ["netcat", "%h", "%p"])
_SECTION = re.compile(r"^\s*\[(?P<group>[\w.-]+)(?::(?P<kind>children|vars))?\]\s*(?:[#;].*)?$")
_RANGE = re.compile(r"\[(\d+):(\d+)\]")
_HOST_AND_PORT = re.compile(r"((?:[^:\[\]]|\[[^\]]*\])+):([0-9]+)")
_TEXTS = {
    "address": ("ansible_host", "ansible_ssh_host"),
    "user": ("ansible_user", "ansible_ssh_user"),
    "port": ("ansible_port", "ansible_ssh_port"),
    "identity_file": ("ansible_private_key_file", "ansible_ssh_private_key_file"),
    "python": ("ansible_python_interpreter",),
}
_ARGUMENTS = ("ansible_ssh_args", "ansible_ssh_common_args", "ansible_ssh_extra_args")
_IGNORED_VALUES = {
    "ansible_connection": ("ssh", "smart", "paramiko", "paramiko_ssh"),
    "ansible_become": ("false", "no"),
    "ansible_python_interpreter": ("auto", "auto_silent", "auto_legacy", "auto_legacy_silent"),
}
_PASSWORDS = ("ansible_password", "ansible_ssh_pass", "ansible_ssh_password", "ansible_become_password")
_MAX_DEPTH = 32
_HINT = "list one host in each line, or use the output of `ansible-inventory --list --yaml`"


@dataclass
class _Group:
    variables: dict[str, Any] = field(default_factory=dict)
    hosts: dict[str, dict[str, Any]] = field(default_factory=dict)
    children: dict[str, None] = field(default_factory=dict)

    def add(self, pattern: str, values: Mapping[str, Any]) -> None:
        """Add the hosts of a pattern. Ansible writes the range `01-04` as `01:04`."""
        with_port = _HOST_AND_PORT.fullmatch(pattern)
        if with_port is not None:
            pattern, values = with_port[1], {"ansible_port": with_port[2], **values}
        for name in ranges.expand_hosts(_RANGE.sub(r"[\1-\2]", pattern)):
            self.hosts.setdefault(name, {}).update(values)


def is_ansible_inventory(text: str) -> bool:
    """Return whether a text looks like an Ansible inventory: it has sections in brackets, or groups with `hosts:`."""
    if any(_SECTION.match(line) for line in text.splitlines()):
        return True
    return bool(
        re.search(r"^\w[\w.-]*:\s*$", text, re.MULTILINE) and re.search(r"^\s+(hosts|children):", text, re.MULTILINE)
    )


def parse_ansible_inventory(text: str) -> list[ListedHost]:
    """Return the hosts of an Ansible inventory in its order, without duplicates.

    Raises:
        HostListError: The text is not valid, has no host, or has a setting that a cluster file cannot express.
    """
    groups: dict[str, _Group] = {"all": _Group()}
    try:
        if any(map(_SECTION.match, text.splitlines())):
            _parse_ini(text, groups)
        else:
            _parse_yaml(yaml.safe_load(text), groups, 0)
        hosts = _resolve_variables(groups)
    except HostListError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = next(iter(str(error).splitlines()), "")
        raise HostListError(f"this inventory cannot be read: {reason}", _HINT) from error
    if not hosts:
        raise HostListError("this inventory contains no hosts", _HINT)
    return [_convert_host(name, values, text) for name, values in hosts.items()]


def _resolve_variables(groups: dict[str, _Group]) -> dict[str, dict[str, Any]]:
    """Return the variables of each host. Host variables win over group variables, and inner over outer groups."""
    depths = dict.fromkeys(groups, 0)
    parents: dict[str, list[str]] = {name: [] for name in groups}
    for _ in range(_MAX_DEPTH):
        before = dict(depths)
        for name, group in groups.items():
            for child in group.children:
                depths[child] = max(depths[child], depths[name] + 1)
                parents[child].append(name)
        if depths == before:
            break
    else:
        raise ValueError(f"the groups contain each other, or are nested in {_MAX_DEPTH} or more levels")
    result: dict[str, dict[str, Any]] = {}
    for host in dict.fromkeys(host for group in groups.values() for host in group.hosts):
        own = [name for name, group in groups.items() if host in group.hosts]
        for name in own:
            own += [parent for parent in dict.fromkeys(parents[name]) if parent not in own]
        ordered = sorted({"all", *own}, key=lambda name: (name != "all", depths[name], name))
        layers = [groups[name].variables for name in ordered] + [groups[name].hosts.get(host, {}) for name in ordered]
        result[host] = {key: value for layer in layers for key, value in layer.items()}
    return result


def _parse_ini(text: str, groups: dict[str, _Group]) -> None:
    group, kind = groups.setdefault("ungrouped", _Group()), None
    for number, line in enumerate(text.splitlines(), 1):
        section = _SECTION.match(line)
        plain = re.split(r"(?:^|\s)[#;]", line, maxsplit=1)[0].strip()
        if section is not None:
            group, kind = groups.setdefault(section["group"], _Group()), section["kind"]
        elif plain and kind == "vars":
            key, _, value = plain.partition("=")
            group.variables[key.strip()] = value.strip().strip("'\"")
        elif plain and kind == "children":
            group.children[plain] = None
            groups.setdefault(plain, _Group())
        elif plain:
            _parse_host_line(plain, number, group)


def _parse_host_line(plain: str, number: int, group: _Group) -> None:
    try:
        name, *words = shlex.split(plain)
        bare = next((word for word in words if "=" not in word), None)
        if bare is not None:
            raise HostListError(f"line {number}: `{bare[:60]}` is not valid", "write `HOST KEY=VALUE`", number)
        group.add(name, dict(word.split("=", 1) for word in words))
    except ranges.HostRangeError as error:
        raise HostListError(f"line {number}: {error}", _HINT, number) from error


def _parse_yaml(tree: object, groups: dict[str, _Group], depth: int) -> None:
    if not isinstance(tree, dict) or depth > _MAX_DEPTH:
        raise ValueError("it must be a mapping of groups with `hosts:`")
    for name, members in tree.items():
        group = groups.setdefault(str(name), _Group())
        if members is None:
            continue
        if not isinstance(members, dict):
            raise ValueError(f"`{name}` is not a group")
        unknown = next((key for key in members if key not in ("vars", "hosts", "children")), None)
        if unknown is not None:
            raise ValueError(f"`{unknown}` is not allowed in the group `{name}`, only `vars`, `hosts` and `children`")
        variables, hosts, children = (members.get(key) or {} for key in ("vars", "hosts", "children"))
        group.variables.update(variables if isinstance(variables, dict) else {})
        if not isinstance(hosts, dict):
            raise ValueError("`hosts:` must be a mapping")
        for pattern, values in hosts.items():
            group.add(str(pattern), values if isinstance(values, dict) else {})
        if children:
            _parse_yaml(children, groups, depth + 1)
            group.children.update(dict.fromkeys(map(str, children)))


def _convert_host(name: str, values: Mapping[str, Any], text: str) -> ListedHost:
    variables = {
        key: str(value) for key, value in values.items() if key.startswith("ansible_") and value not in (None, "")
    }
    keys: dict[str, Any] = {}
    for key, value in variables.items():
        _refuse_unsupported_variable(name, key, value, text)
        try:
            keys.update(convert_ssh_arguments_to_keys(value) if key in _ARGUMENTS else {})
        except ValueError as error:
            message = f"{error}, which a cluster file cannot express"
            raise _build_variable_error(name, key, message, text, "write it into `~/.ssh/config` instead") from error
    for key, names in _TEXTS.items():
        for variable in reversed(names):
            if variables.get(variable, "auto").lower() not in _IGNORED_VALUES.get(variable, ("auto",)):
                keys[key] = variables[variable]
    port = keys.pop("port", None)
    if port is not None and not (re.fullmatch("[0-9]{1,5}", port) and 0 < int(port) < 65536):
        raise _build_variable_error(name, "ansible_port", f"`{port[:60]}` is not a port", text)
    if keys.get("address") == name:
        del keys["address"]
    return ListedHost(name, port=None if port is None else int(port), **keys)


def _refuse_unsupported_variable(name: str, key: str, value: str, text: str) -> None:
    """Raise an error for a variable of Ansible that a cluster file cannot express."""
    if "{{" in value:
        hint = "`ansible-inventory --list --yaml` writes an inventory without templates"
        raise _build_variable_error(name, key, f"`{value[:60]}` is a template", text, hint)
    if key in _PASSWORDS:
        hint = "`clusterctl trust --login` asks for the password"
        raise _build_variable_error(name, key, "passwords do not belong in a cluster file", text, hint)
    is_known = key in _ARGUMENTS or any(key in names for names in _TEXTS.values())
    if not is_known and value.lower() not in _IGNORED_VALUES.get(key, ()):
        hint = "delete the variable if clusterctl does not need it"
        raise _build_variable_error(name, key, "a cluster file cannot express this variable", text, hint)


def _build_variable_error(name: str, key: str, message: str, text: str, hint: str | None = None) -> HostListError:
    line = next((number for number, line in enumerate(text.splitlines(), 1) if key in line), 0)
    place = f"line {line}: " if line else ""
    return HostListError(f"{place}`{key}` of `{name}`: {message}", hint, line)
