"""The command `container` of the agent: it gets the image of a container to this node, and tries it once."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from clusterctl.agent.environment import container_commands, container_keeper, store
from clusterctl.agent.linux import helper_process, syscalls
from clusterctl.agent.protocol import command_messages

if TYPE_CHECKING:
    from clusterctl.agent.linux.helper_process import HelperOutput
    from clusterctl.agent.protocol.command_payload_types import Container

_TRY_LIMIT_S = 30.0
_CONNECT_LIMIT_S = 5.0
_PRINT_VERSION = "import sys; print('{}.{}.{}'.format(*sys.version_info))"


def main(_arguments: list[str]) -> int:
    """Get the image that the JSON on stdin describes; print a JSON object as the last line, and return an exit code."""
    try:
        answer = get_image(json.load(sys.stdin))
    except command_messages.RequestError as error:
        sys.stdout.write(f"{error}; {error.hint}\n" if error.hint else f"{error}\n")
        return 1
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


def get_image(request: dict[str, Any]) -> dict[str, Any]:
    """Get an image to this node, and start a container of it once for each image and settings.

    Args:
        request: `container` (`command_payload_types.Container`), `root` (the state root), `python` (the interpreter of
            the workers), `pull` (whether the node may pull the image), and `archive` (a file in `images` of the state
            root to load, or missing).

    Returns:
        `id` of the image, `None` if the node lacks it; `why` a pull was not possible; `python`, the version of Python
        in the image, or `None`.

    Raises:
        RequestError: The node has no runtime, or a container cannot be started.
    """
    folder, container = os.path.expanduser(container_keeper.FOLDER), request["container"]
    store.make_folder(folder)
    image, runtime = container["image"], container_keeper.choose_runtime(container["runtime"])
    file = container_commands.get_image_file(folder, image)
    received = f"{request['root']}/images"
    # Nodes may share the home, and so the files of apptainer. Docker and podman keep images of their own on each node.
    place = f"{folder}/images" if runtime == "apptainer" else received
    os.makedirs(place, exist_ok=True)
    with open(f"{place}/.{os.path.basename(file)}.lock", "a") as lock:
        # Another run may be pulling the same image.
        fcntl.flock(lock, fcntl.LOCK_EX)
        found, why = container_keeper.find_image(runtime, image), ""
        if request.get("archive"):
            archive, part = f"{received}/{request['archive']}", f"{file}.part"
            why = _run_runtime(container_commands.build_load_command(runtime, archive, part))
            if runtime == "apptainer" and not why:
                os.replace(part, file)
            with contextlib.suppress(OSError):
                os.unlink(archive)
        elif found is None and request["pull"]:
            why = _pull(runtime, image, file)
        if found is None or request.get("archive"):
            found = container_keeper.find_image(runtime, image)
        if found is None:
            return {"id": None, "why": why, "python": None, "runtime": runtime}
        known = f"{place}/{container_commands.get_settings_key(container, found)}.json"
        tried = syscalls.read_json(known)
        if tried is None or tried.get("name") != request["python"]:
            tried = {"name": request["python"], "python": _try_container(request["root"], container, request["python"])}
            syscalls.write_json(known, tried)
        return {"id": found, "why": "", "python": tried["python"], "runtime": runtime}


def _pull(runtime: str, image: str, file: str) -> str:
    """Pull an image if its registry can be reached; return why the node has none, or ""."""
    registry = container_commands.get_registry(image)
    if registry is None:
        return "no registry has it"
    if not any(name in os.environ for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY")):
        # Without this check, a pull would try for minutes.
        try:
            socket.create_connection(registry, _CONNECT_LIMIT_S).close()
        except OSError as error:
            return f"{registry[0]} cannot be reached: {error.strerror or error}"
    return _run_runtime(container_commands.build_pull_command(runtime, image, file))


def _run_runtime(argv: list[str]) -> str:
    """Run a command of the runtime and pass its output on; return its last line if it fails, or ""."""
    last = ""
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.buffer.write(line)
            sys.stdout.flush()
            last = line.decode("utf-8", "replace").strip() or last
    return last if process.returncode else ""


def _try_container(root: str, container: Container, python: str) -> str | None:
    """Start a container and return the version of its Python, `None` if it has none.

    Raises:
        RequestError: The container cannot be started.
    """
    keeper = container_keeper.Keeper(f"{root}/.container-{os.urandom(6).hex()}")

    def find_python(_out: HelperOutput) -> dict[str, Any]:
        keeper.enter()
        try:
            code, output, _ = syscalls.run_program([python, "-c", _PRINT_VERSION], _TRY_LIMIT_S)
        except OSError:
            code, output = 1, ""
        return {"python": output.strip() if code == 0 else None}

    try:
        keeper.start(container, [root])
        answer = helper_process.parse_result(helper_process.run_in_helper(find_python, _TRY_LIMIT_S))
    finally:
        keeper.remove()
    if isinstance(answer, Exception):
        raise answer
    python_version: str | None = answer["python"]
    return python_version
