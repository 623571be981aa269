"""Which hosts each role of a job takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from clusterctl.config.host_ranges import expand_hosts, fold_hosts
from clusterctl.config.spec import RoleSpec
from clusterctl.config.value_parsers import InvalidValueError
from clusterctl.formatting import plural
from clusterctl.suggestion import find_similar

PROGRAM_KEYS = ("script", "module", "command")


def allocate_roles(roles: Mapping[str, RoleSpec], hosts: Sequence[str]) -> dict[str, str]:
    """Return the role of each host, in the order of the roles. Hosts without a name in the file go in their order.

    Raises:
        InvalidValueError: The roles need more hosts than there are, or fewer.
    """
    named = [(host, name) for name, role in roles.items() for text in role.hosts for host in expand_hosts(text)]
    owners: dict[str, str] = {}
    for host, name in named:
        if host not in hosts:
            near = find_similar(host, hosts)
            hint = f"did you mean `{near}`?" if near else f"the hosts of this run are {fold_hosts(hosts)}"
            raise InvalidValueError(f"`{host}`, a host of role `{name}`, takes no part in the run", hint)
        if owners.setdefault(host, name) != name:
            raise InvalidValueError(f"`{host}` is a host of role `{owners[host]}` and of role `{name}`")
    free = [host for host in hosts if host not in owners]
    without_number = [name for name, role in roles.items() if role.nodes is None and not role.hosts]
    if len(without_number) > 1:
        names = " and ".join(f"`{name}`" for name in without_number)
        raise InvalidValueError(f"{names} have neither `nodes` nor `hosts`", "only one role takes all other nodes")
    wanted = sum(role.nodes or 0 for role in roles.values())
    needed = wanted + len(without_number)
    if needed > len(free):
        text = f"its roles need {plural(needed + len(owners), 'node')}, but the run has {len(hosts)}"
        raise InvalidValueError(text, "write fewer nodes, or add hosts")
    if not without_number and wanted < len(free):
        unused = fold_hosts(free[wanted:])
        hint = f"leave out `nodes` of one role, or run with `--exclude {unused}`"
        raise InvalidValueError(f"no role takes {unused}", hint)
    placed: dict[str, str] = {}
    for name, role in roles.items():
        count = len(free) - wanted if name in without_number else role.nodes or 0
        own = [host for host in hosts if owners.get(host) == name]
        left = [host for host in free if host not in placed]
        placed |= dict.fromkeys([*own, *left[:count]], name)
    return placed
