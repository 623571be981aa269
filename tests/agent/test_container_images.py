"""Images for nodes that share a home, with a runtime that keeps them on each node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.agent.environment.container_maker import get_image

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

DOCKER = """\
#!/bin/bash
case $1 in
image) cat "$NODE/loaded" 2>/dev/null ;;
load) cp "$3" "$NODE/loaded" ;;
run) setsid /bin/sh -c "${@: -2:1}" "${@: -1}" </dev/null >/dev/null 2>&1 & ;;
esac
"""


def test_each_node_with_a_shared_home_loads_the_archive_that_it_got(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/docker").write_text(DOCKER)
    (tmp_path / "bin/docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    container = {"image": "torch", "runtime": "docker", "args": [], "mounts": []}
    nodes = [tmp_path / name for name in ("a", "b")]
    for node in nodes:
        (node / "images").mkdir(parents=True)
        (node / "images/torch.tar").write_text("sha256:0123\n")

    answers = []
    for node in nodes:
        monkeypatch.setenv("NODE", str(node))
        request = {"container": container, "root": str(node), "python": "python3", "pull": False}
        answers.append(get_image({**request, "archive": "torch.tar"}))

    assert [(answer["id"], answer["why"]) for answer in answers] == [("0123", "")] * 2
    assert not [node for node in nodes if (node / "images/torch.tar").exists()]
