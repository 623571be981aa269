"""Gets the image of the workers' container to all nodes of a run. Nodes that cannot pull it get it from the head."""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterctl.config.host_ranges import fold_hosts
from clusterctl.config.spec import ClusterSpec, ContainerSpec, EnvironmentSpec
from clusterctl.errors import ClusterctlError, EnvironmentFailed, NodeEnvironmentError
from clusterctl.plan.launch import build_container
from clusterctl.run.environments.node_entries import call_until_failure, run_agent_command
from clusterctl.run.environments.recipe import get_cache_folder
from clusterctl.run.nodes.distribution import send_files
from clusterctl.run.nodes.fan_out import Progress, raise_first
from clusterctl.run.nodes.uploads import Destination, build_file_upload
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.rules.controller_events import ControllerEvent, Note
from clusterctl.session.node_session import Session

_MAX_IMAGE_BYTES = 1 << 42
_HEAD_RUNTIMES = ("docker", "podman")
_SHOWN_ID = 12


@dataclass(frozen=True, slots=True)
class NodeImage:
    """What a node answers about the image.

    Attributes:
        id: The id of the image, `None` if the node lacks it.
        python: The version of Python in the image, `None` if it has none.
        why: Why the node could not get the image.
        is_file: Whether the image is a file of apptainer, whose id says nothing about the content.
    """

    id: str | None
    python: str | None
    why: str
    is_file: bool


def parse_node_image(output: str) -> NodeImage:
    """Return the answer in the last line of a node's output.

    Raises:
        ValueError: The line is no answer.
    """
    found = json.loads(output.strip().rpartition("\n")[2])
    texts = [found[name] for name in ("id", "python")]
    if not all(text is None or isinstance(text, str) for text in texts):
        raise ValueError("the answer has values of wrong types")
    return NodeImage(texts[0], texts[1], str(found["why"]), found["runtime"] == "apptainer")


class ImageProvider:
    """Gets the image of a run to its nodes, and keeps the output of each node in the run directory.

    Thread: the launch thread.
    """

    def __init__(self, run: RunDir, spec: ClusterSpec, post: Callable[[ControllerEvent], None]) -> None:
        self._run, self._spec, self._post = run, spec, post

    def provide(self, settings: EnvironmentSpec, sessions: Mapping[str, Session]) -> None:
        """Get the image to each node that lacks it, and try a container of it there.

        Raises:
            EnvironmentFailed: The head has no image to send, or the image has no Python for the job.
            NodeError, NodesError: A node failed.
        """
        step = Progress("environment", len(sessions), self._post)
        try:
            step.end(self._provide(settings, sessions, step))
        except ClusterctlError:
            step.end(failed=True)
            raise

    def _provide(self, settings: EnvironmentSpec, sessions: Mapping[str, Session], step: Progress) -> str:
        container = settings.container
        assert container is not None
        for node in sessions:
            step.set_waiting(node, "looking for the image")
        found = self._ask(sessions, {"pull": settings.fetch != "head"})
        stored = find_image_on_head(container.image) if settings.fetch == "head" else None
        wanted = None if stored is None else stored[1]
        lacking = {
            node: sessions[node]
            for node, image in found.items()
            if image.id is None or (wanted is not None and not image.is_file and image.id != wanted)
        }
        if lacking:
            node = next(iter(lacking))
            if settings.fetch == "node":
                raise NodeEnvironmentError(node, f"cannot pull `{container.image}`: {found[node].why}")
            archive = save_image(container.image, f"{node} has no image `{container.image}` ({found[node].why})")
            self._send(archive, lacking, step)
            found |= self._ask(lacking, {"pull": False, "archive": archive.name})
        for node, image in found.items():
            if image.id is None:
                text = f"the image `{container.image}` of the head is not there after it was loaded: {image.why}"
                raise NodeEnvironmentError(node, text)
            step.finish_node(node)
        self._compare(container, found)
        return f"{container.image} {found[next(iter(found))].id}"[: len(container.image) + 1 + _SHOWN_ID] + (
            f", sent to {fold_hosts(lacking)}" if lacking else ""
        )

    def _ask(self, sessions: Mapping[str, Session], more: Mapping[str, Any]) -> dict[str, NodeImage]:
        hosts = {host.name: host for host in self._spec.hosts}

        def ask(node: str, session: Session, failed: threading.Event) -> NodeImage:
            request = {
                "container": build_container(self._spec),
                "root": session.hello["state_root"],
                "python": hosts[node].python or "python3",
                **more,
            }
            output = run_agent_command(self._run, node, session, "container", request, failed, quoted_lines=1)
            try:
                return parse_node_image(output)
            except (ValueError, LookupError, TypeError) as error:
                raise NodeEnvironmentError(node, f"it gave no answer about the image: {error}") from error

        return call_until_failure(sessions, ask)

    def _send(self, archive: Path, sessions: Mapping[str, Session], step: Progress) -> None:
        for node in sessions:
            step.set_waiting(node, "receiving the image")
        files = build_file_upload([str(archive)], _MAX_IMAGE_BYTES)
        places = {
            node: Destination(str(session.hello["state_root"]), "images", is_folder=True)
            for node, session in sessions.items()
        }
        total = files.size_bytes * len(sessions)
        _, errors = send_files(
            self._spec, sessions, places, files, lambda _node, count: step.add_bytes("image", count, total)
        )
        raise_first(errors)

    def _compare(self, container: ContainerSpec, found: Mapping[str, NodeImage]) -> None:
        """Warn if nodes have different images of the same name, and if the image has no usable Python."""
        by_id: dict[str, list[str]] = {}
        for node, image in found.items():
            by_id.setdefault(str(image.id), []).append(node)
        if len(by_id) > 1 and not any(image.is_file for image in found.values()):
            texts = [f"{fold_hosts(nodes)} {image[:_SHOWN_ID]}" for image, nodes in by_id.items()]
            text = (
                f"nodes have different images `{container.image}`: {', '.join(texts)}; `fetch: head` makes them equal"
            )
            self._post(Note(text=text, level="warn"))
        without = [node for node, image in found.items() if image.python is None]
        job = self._spec.job
        if without and job is not None and job.command is None:
            name = next(host.python for host in self._spec.hosts if host.name == without[0]) or "python3"
            hint = "set `python` of the hosts to the path of a Python in the image, or use `job.command`"
            raise NodeEnvironmentError(without[0], f"the image `{container.image}` has no program `{name}`", hint=hint)
        if without and job is not None and job.inject:
            text = f"the image `{container.image}` has no Python: clusterctl sees no steps and no stacks of its workers"
            self._post(Note(text=text, level="warn"))


def find_image_on_head(image: str) -> tuple[str, str] | None:
    """Return a runtime of the head and the id of its image of this name, or `None`."""
    for runtime in _HEAD_RUNTIMES:
        if shutil.which(runtime) is not None:
            done = _run_on_head([runtime, "image", "inspect", "--format", "{{.Id}}", image])
            if done.returncode == 0:
                return runtime, done.stdout.strip().rpartition(":")[2]
    return None


def save_image(image: str, why: str) -> Path:
    """Return an archive of an image on the head, which pulls the image if it lacks it. Images are saved once.

    Args:
        image: The name of the image.
        why: Why the archive is necessary.

    Raises:
        EnvironmentFailed: The head cannot get the image.
    """
    found = find_image_on_head(image)
    if found is None:
        runtimes = [name for name in _HEAD_RUNTIMES if shutil.which(name) and not _run_on_head([name, "ps"]).returncode]
        if not runtimes:
            hint = "`docker save` needs docker or podman on this head; or load the image on the nodes"
            raise EnvironmentFailed(f"{why}, and this head has no container runtime that works", hint=hint)
        done = _run_on_head([runtimes[0], "pull", image])
        found = find_image_on_head(image)
        if found is None:
            lines = done.stderr.strip().splitlines() or ["no reason is known"]
            hint = "build or pull the image on this head, or correct `environment.container.image`"
            raise EnvironmentFailed(f"{why}, and this head cannot pull it: {lines[-1].strip()}", hint=hint)
    runtime, identity = found
    archive = get_cache_folder("images") / f"{identity[:24]}.tar"
    if not archive.is_file():
        # Another run may be saving the same image.
        part = archive.with_name(f".{secrets.token_hex(8)}.tar")
        try:
            done = _run_on_head([runtime, "save", "--output", str(part), image])
            if done.returncode:
                raise EnvironmentFailed(f"cannot save `{image}` on this head: {done.stderr.strip()}")
            part.replace(archive)
        finally:
            part.unlink(missing_ok=True)
    return archive


def _run_on_head(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
