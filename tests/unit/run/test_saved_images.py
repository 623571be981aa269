"""The archives of images on the head."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from clusterctl.run.environments.container_start import save_image

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

DOCKER = """\
#!/bin/bash
case $1 in
image) echo sha256:0123456789abcdef0123456789abcdef ;;
save)
    printf begin >"$3"
    touch "$STARTED/$$"
    for _ in {1..1000}; do
        [ "$(ls "$STARTED" | wc -l)" = 2 ] && break
        sleep 0.02
    done
    [ "$(ls "$STARTED" | head -n 1)" = $$ ] || sleep 0.2
    printf end >>"$3"
    ;;
esac
"""
"""Ends to save at different times, and not before two have begun."""


def test_two_runs_save_an_image_at_once_and_the_archive_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("bin", "started"):
        (tmp_path / name).mkdir()
    (tmp_path / "bin/docker").write_text(DOCKER)
    (tmp_path / "bin/docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("STARTED", str(tmp_path / "started"))

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(save_image, ["busybox"] * 2, ["no node has it"] * 2)

    assert first == second
    assert first.read_text() == "beginend"
    assert list(first.parent.iterdir()) == [first]
