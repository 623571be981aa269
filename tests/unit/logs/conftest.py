from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from clusterctl.agent.protocol.run_files import INDEX_RECORD, format_index_path, format_output_path

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class RunDir:
    """Writes replicas the way that replication does."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def log(self, node: str, rank: int, attempt: int = 0) -> Path:
        path = self.path / "nodes" / node / format_output_path(attempt, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def write(self, node: str, rank: int, data: bytes, *, time: float | None = None, attempt: int = 0) -> None:
        path = self.log(node, rank, attempt)
        with path.open("ab") as file:
            file.write(data)
        if time is not None:
            self.mark(node, rank, path.stat().st_size, time, attempt=attempt)

    def mark(self, node: str, rank: int, size: int, time: float, *, attempt: int = 0) -> None:
        index = self.path / "nodes" / node / format_index_path(attempt, rank)
        with index.open("ab") as file:
            file.write(INDEX_RECORD.pack(size, time))


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


@pytest.fixture(scope="session")
def new_run_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], RunDir]:
    return lambda: RunDir(tmp_path_factory.mktemp("run"))
