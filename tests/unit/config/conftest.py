"""A cluster file's surroundings, as data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from typing_extensions import override

from clusterctl.config.loader import ClusterFileText, LoadedClusterFile, parse_cluster_file
from clusterctl.config.sections.build_context import DiskFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FOLDER = "/home/me/llm"


class Shelf(DiskFiles):
    """Files by path; folders are what holds them."""

    def __init__(self, contents: dict[str, bytes]) -> None:
        self.contents = contents

    @override
    def read(self, path: str) -> bytes:
        if path not in self.contents:
            raise FileNotFoundError(2, "No such file or directory", path)
        return self.contents[path]

    read_trusted = read

    @override
    def is_file(self, path: str) -> bool:
        return path in self.contents

    @override
    def is_dir(self, path: str) -> bool:
        return any(name.startswith(path.rstrip("/") + "/") for name in self.contents)

    @override
    def resolve_links(self, path: str) -> str:
        return path.replace("/home/me/link", FOLDER).replace(f"{FOLDER}/linked.py", "/elsewhere/linked.py")

    @override
    def find_upload_obstacle(self, path: str) -> str | None:
        return "is a home directory" if path == "/home/me" else None

    @override
    def list_names(self, path: str) -> Sequence[str]:
        return sorted({name[len(path) + 1 :].split("/")[0] for name in self.contents if name.startswith(path + "/")})


SHELF = Shelf(
    {
        f"{FOLDER}/train.py": b"",
        f"{FOLDER}/linked.py": b"",
        f"{FOLDER}/src/run.py": b"",
        f"{FOLDER}/.env": b"# settings\nA=1\nexport B='x y' \nC=a b # note\n\n",
        f"{FOLDER}/dollar.env": b"A=^x$\nPW=pa$word\n",
        f"{FOLDER}/quoted.env": b"PW='pa$word ${x}'\nN=${env:N}\nNONE=   # a comment\nHASH=#1\nQ = \"a # b\"  # c\n",
        f"{FOLDER}/bad.env": b"A=1\nRANK=1\nno equals sign\n",
        f"{FOLDER}/latin.env": b"A=\xe4\n",
        "/home/me/.token": b"s3cret\n",
        "/home/me/.token.env": b"A=1\n",
        "/keys/there": b"",
        "/keys/public.pub": b"",
    }
)


def _parse(
    *texts: bytes | str, environ: dict[str, str] | None = None, contents: dict[str, str] | None = None, **options: Any
) -> LoadedClusterFile:
    more = {f"{FOLDER}/{name}": text.encode() for name, text in (contents or {}).items()}
    names = ["cluster.yaml", "more.yaml", "third.yaml"]
    sources = [
        ClusterFileText(path=n, absolute_path=f"{FOLDER}/{n}", content=t) for n, t in zip(names, texts, strict=False)
    ]
    return parse_cluster_file(
        sources, environ={"HOME": "/home/me", **(environ or {})}, files=Shelf({**SHELF.contents, **more}), **options
    )


@pytest.fixture(scope="session")
def parse_text() -> Callable[..., LoadedClusterFile]:
    return _parse
