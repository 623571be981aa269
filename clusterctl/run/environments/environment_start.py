"""Makes the environment of the workers on all nodes of a run, once for each node or shared home."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from clusterctl.agent.protocol.command_payload_types import EnvironmentAnswer, EnvironmentArguments
from clusterctl.config.default_workdir import build_environment_python
from clusterctl.config.spec import ClusterSpec, EnvironmentSpec
from clusterctl.errors import ClusterctlError, NodeEnvironmentError
from clusterctl.formatting import format_size, plural
from clusterctl.run.environments.locked_packages import Platform
from clusterctl.run.environments.node_entries import (
    build_python_request,
    build_venv_request,
    call_until_failure,
    get_environments_folder,
    make_entry,
)
from clusterctl.run.environments.python_archive import pack_python
from clusterctl.run.environments.recipe import Recipe
from clusterctl.run.environments.uv_recipe import choose_python, load_uv_recipe
from clusterctl.run.environments.venv_recipe import load_venv_recipe, read_venv_python
from clusterctl.run.nodes.distribution import send_files
from clusterctl.run.nodes.fan_out import Progress, call_all, raise_first
from clusterctl.run.nodes.uploads import Destination, Upload, build_file_upload
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.rules.controller_events import ControllerEvent
from clusterctl.session.node_session import Session
from clusterctl.session.request_definitions import ENVIRONMENT

_MAX_PACKAGE_BYTES = 1 << 42
_UNPACKED_FACTOR = 4
"""An installed package takes about this many times the size of its wheel, which is stored beside it."""


def get_platform(session: Session, python: str) -> Platform:
    """Return the platform of a node, with a version of Python."""
    return Platform(session.hello.get("machine", "x86_64"), session.hello.get("libc", "glibc 2.17"), python)


@dataclass(frozen=True, slots=True)
class NodeEnvironment:
    """The environment of one node.

    Attributes:
        folder: The folder of environments on the node.
        recipe: The packages.
    """

    folder: str
    recipe: Recipe

    @property
    def python(self) -> str:
        """Path of the environment's Python on the node."""
        return f"{self.folder}/{self.recipe.key}/bin/python"


def choose_environment_python(settings: EnvironmentSpec) -> str:
    """Return the minor version of Python of an environment.

    Raises:
        EnvironmentFailed: The virtual environment to copy cannot be read.
    """
    return choose_python(settings) if settings.venv is None else read_venv_python(settings.venv)


def plan_environments(settings: EnvironmentSpec, sessions: Mapping[str, Session]) -> dict[str, NodeEnvironment]:
    """Return the environment of each node. No node is asked.

    Raises:
        EnvironmentFailed: The packages cannot be locked for a platform.
    """
    python = choose_environment_python(settings)
    platforms = {node: get_platform(session, python) for node, session in sessions.items()}
    recipes = {platform: _load_recipe(settings, platform) for platform in dict.fromkeys(platforms.values())}
    return {
        node: NodeEnvironment(get_environments_folder(session), recipes[platforms[node]])
        for node, session in sessions.items()
    }


def _load_recipe(settings: EnvironmentSpec, platform: Platform) -> Recipe:
    return load_uv_recipe(settings, platform) if settings.venv is None else load_venv_recipe(settings.venv, platform)


def use_environments(spec: ClusterSpec, planned: Mapping[str, NodeEnvironment]) -> ClusterSpec:
    """Return a spec whose hosts name the Python of their environment."""
    hosts = [replace(host, python=found.python) if (found := planned.get(host.name)) else host for host in spec.hosts]
    return replace(spec, hosts=tuple(hosts))


class EnvironmentMaker:
    """Makes environments on nodes, and keeps the output of each node in the run directory.

    Thread: the launch thread.
    """

    def __init__(self, run: RunDir, post: Callable[[ControllerEvent], None]) -> None:
        self._run, self._post = run, post

    def make(self, spec: ClusterSpec, settings: EnvironmentSpec, sessions: Mapping[str, Session]) -> ClusterSpec:
        """Make the environment on each node that lacks it; return a spec whose hosts use the environments.

        Raises:
            EnvironmentFailed: The packages cannot be locked, fetched or built on the head.
            NodeError, NodesError: A node failed.
        """
        step = Progress("environment", len(sessions), self._post)
        try:
            planned = plan_environments(settings, sessions)
            detail = self._make_missing(spec, settings, planned, sessions, step)
        except ClusterctlError:
            step.end(failed=True)
            raise
        step.end(detail)
        return use_environments(spec, planned)

    def _make_missing(
        self,
        spec: ClusterSpec,
        settings: EnvironmentSpec,
        planned: Mapping[str, NodeEnvironment],
        sessions: Mapping[str, Session],
        step: Progress,
    ) -> str:
        """Make the missing environments; return a description of what was done."""
        question = dict[str, EnvironmentArguments]()
        python = build_environment_python(settings.uv or settings.venv, settings.python, *settings.extras)
        for node, mine in planned.items():
            names, version = [mine.recipe.key], mine.recipe.platform.python
            question[node] = {"folder": mine.folder, "names": names, "python": version, "link": python.split("/")[-3]}

        def look(node: str, session: Session) -> EnvironmentAnswer:
            return ENVIRONMENT.call(session, question[node])

        def trim(node: str, session: Session) -> EnvironmentAnswer:
            return ENVIRONMENT.call(session, {**question[node], "max_size": settings.max_size})

        found, errors = call_all(dict(sessions), look)
        raise_first(errors)
        lacking = {node: session for node, session in sessions.items() if not found[node]["made"]}
        for node in sessions.keys() - lacking.keys():
            step.finish_node(node)
        keys = sorted({mine.recipe.key for mine in planned.values()})
        if not lacking:
            return f"{', '.join(keys)}, as before"
        makers: dict[tuple[str, str], str] = {}
        for node in lacking:
            makers.setdefault((found[node]["id"], planned[node].recipe.key), node)
        for recipe in dict.fromkeys(planned[node].recipe for node in makers.values()):
            nodes = [node for node in makers.values() if planned[node].recipe == recipe]
            self._make_recipe(spec, settings, recipe, {node: sessions[node] for node in nodes}, planned, found, step)
        trimmed, errors = call_all(lacking, trim)
        raise_first(errors)
        torn = [node for node, answer in trimmed.items() if not answer["made"]]
        if torn:
            raise NodeEnvironmentError(torn[0], "the environment that another node of its home made is not there")
        for node in lacking:
            step.finish_node(node)
        return f"{', '.join(keys)}, made on {plural(len(makers), 'node')}"

    def _make_recipe(
        self,
        spec: ClusterSpec,
        settings: EnvironmentSpec,
        recipe: Recipe,
        sessions: Mapping[str, Session],
        planned: Mapping[str, NodeEnvironment],
        found: Mapping[str, EnvironmentAnswer],
        step: Progress,
    ) -> None:
        for node in sessions:
            step.set_waiting(node, "waiting for the head's downloads")
        by_nodes = self._can_nodes_fetch(settings, recipe, sessions, planned)
        parts = recipe.gather_parts(lambda what: _set_detail(step, what), by_nodes=by_nodes)
        lacks_python = [node for node in sessions if found[node]["python"] is None and not parts.has_python]
        archive = pack_python(recipe.platform) if lacks_python else None
        upload = build_file_upload(list(map(str, parts.paths)), _MAX_PACKAGE_BYTES)
        with_python = build_file_upload([str(path) for path in (*parts.paths, archive) if path], _MAX_PACKAGE_BYTES)
        for node in sessions:
            _refuse_without_space(node, planned[node].folder, upload, found[node]["free"])
        groups = [(lacks_python, with_python), ([node for node in sessions if node not in lacks_python], upload)]
        for nodes, files_to_send in groups:
            self._send(spec, {node: sessions[node] for node in nodes}, planned, files_to_send, step)
        sent = [path.name for path in parts.paths]

        def build(node: str, session: Session, failed: threading.Event) -> None:
            step.set_waiting(node, "installing packages")
            folder, python, uses = planned[node].folder, found[node]["python"] or "", sent
            if node in lacks_python:
                assert archive is not None
                name = archive.name.removesuffix(".tar.gz")
                make_entry(self._run, node, session, build_python_request(folder, name, archive.name), failed)
                python, uses = f"{folder}/{name}/bin/python{recipe.platform.python}", [*sent, name, archive.name]
            steps = parts.steps(folder, recipe.key, python)
            make_entry(self._run, node, session, build_venv_request(folder, recipe.key, steps, uses), failed)

        call_until_failure(sessions, build)

    def _can_nodes_fetch(
        self,
        settings: EnvironmentSpec,
        recipe: Recipe,
        sessions: Mapping[str, Session],
        planned: Mapping[str, NodeEnvironment],
    ) -> bool:
        """Return whether the nodes download packages themselves."""
        url = recipe.find_url() if settings.fetch == "auto" else None
        if url is None:
            return settings.fetch == "node"

        def look(node: str, session: Session) -> bool:
            return ENVIRONMENT.call(session, {"folder": planned[node].folder, "names": [], "url": url})["reachable"]

        answers, _ = call_all(dict(sessions), look)
        return len(answers) == len(sessions) and all(answers.values())

    def _send(
        self,
        spec: ClusterSpec,
        sessions: Mapping[str, Session],
        planned: Mapping[str, NodeEnvironment],
        files: Upload,
        step: Progress,
    ) -> None:
        places = {node: Destination(planned[node].folder, "packages", is_folder=True) for node in sessions}
        for node in sessions:
            step.set_waiting(node, "receiving packages")
        _, errors = send_files(
            spec,
            sessions,
            places,
            files,
            lambda _node, count: step.add_bytes("packages", count, files.size_bytes * len(sessions)),
        )
        raise_first(errors)


def _set_detail(step: Progress, what: str) -> None:
    step.detail = what


def _refuse_without_space(node: str, folder: str, files: Upload, free: int) -> None:
    needed = files.size_bytes * _UNPACKED_FACTOR
    if needed > free:
        text = f"{folder} has {format_size(free)} free, and the environment needs about {format_size(needed)}"
        raise NodeEnvironmentError(node, text, hint="`clusterctl clean --environments` removes unused environments")
