"""The roles of a job: which nodes each role takes, the order of their starts, and checks of their keys."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from graphlib import CycleError, TopologicalSorter

from clusterctl.config.host_ranges import fold_hosts
from clusterctl.config.role_allocation import PROGRAM_KEYS, allocate_roles
from clusterctl.config.sections import environment_section, job_checks
from clusterctl.config.sections.build_context import BuildContext
from clusterctl.config.sections.host_section import DeclaredHost
from clusterctl.config.spec import JobSpec, Role, SyncSpec
from clusterctl.config.text.tree import TreeNode
from clusterctl.suggestion import find_similar

_ROLE_NAME = re.compile(r"[a-z][a-z0-9_]{0,30}")
"""A name becomes a part of names of variables, such as CLUSTERCTL_SERVER_ADDR."""
_Problem = tuple[tuple[str | int, ...], str, str | None]


def check_roles(
    root: TreeNode, job: JobSpec, sync: SyncSpec | None, hosts: Sequence[DeclaredHost], context: BuildContext
) -> None:
    """Report what is wrong with the roles of a job."""
    roles, report = root.find("job", "roles"), context.report
    if not job.roles or roles is None:
        return
    for path, text, hint in _list_problems(job, hosts):
        name = ".".join(("job", "roles", *map(str, path)))
        report.add(root.find_mark("job", "roles", *path), f"{name}: {text}", hint)
    for name, role in job.roles.items():
        node = roles.child(name)
        env = None if node is None else node.child("env")
        if env is not None and env.value:
            environment_section.check_variable_names(env, ("job", "roles", name, "env"), report)
        if role.script is not None and sync is not None:
            mark = root.find_mark("job", "roles", name, "script")
            job_checks.check_script(role.script, sync.source, hosts, mark, context)


def _list_problems(job: JobSpec, hosts: Sequence[DeclaredHost]) -> Iterator[_Problem]:
    roles = job.roles
    spares = [host.spec.name for host in hosts if host.spec.role is Role.SPARE]
    if spares:
        yield (), f"a job with roles uses no spares: {fold_hosts(spares)}", "remove `role: spare`, or the roles"
    for name, role in roles.items():
        if not _ROLE_NAME.fullmatch(name):
            yield (name,), "not a name of a role", "lower-case letters, digits and `_`, beginning with a letter"
        programs = [key for key in PROGRAM_KEYS if getattr(role, key) is not None]
        if len(programs) != 1:
            wrong = "exclude each other" if programs else "is missing"
            words = " and ".join(f"`{key}`" for key in programs) or "one of `script`, `module`, `command`"
            yield (name,), f"{words} {wrong}", "a role has exactly one of `script`, `module`, `command`"
        if role.nodes is not None and role.hosts:
            yield (name, "hosts"), "`nodes` and `hosts` exclude each other", None
        for other in role.needs:
            if other not in roles:
                near = find_similar(other, roles)
                yield (name, "needs"), f"no role `{other}`", f"did you mean `{near}`?" if near else None
        ready = role.ready
        if ready is not None and ready.port is None and ready.output is None:
            yield (name, "ready"), "one of `port`, `output` is missing", "write `ready: {port: 8000}`"
        if ready is not None and ready.http is not None and (ready.port is None or not ready.http.startswith("/")):
            yield (name, "ready", "http"), "needs `port`, and a path such as `/health`", None
    try:
        list(TopologicalSorter({name: role.needs for name, role in roles.items()}).static_order())
    except CycleError as error:
        circle = [*reversed(error.args[1])]
        yield (circle[0], "needs"), f"a circle: {' needs '.join(f'`{name}`' for name in circle)}", "remove one `needs`"
    if hosts and not spares:
        try:
            allocate_roles(roles, [host.spec.name for host in hosts])
        except ValueError as error:
            yield (), str(error), getattr(error, "hint", None)
