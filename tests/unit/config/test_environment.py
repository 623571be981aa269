"""The keys `environment` and `job.setup`: what is understood, and what each mistake is answered with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from clusterctl.config.spec import ContainerSpec
from clusterctl.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from clusterctl.config.loader import LoadedClusterFile

HEAD = "version: 1\nhosts: [a, b]\njob: {script: train.py}\n"
LOCKED = {"uv.lock": "", "pyproject.toml": ""}


def test_the_paths_of_an_environment_start_at_the_cluster_file(parse_text: Callable[..., LoadedClusterFile]) -> None:
    found = parse_text(HEAD + "environment: {uv: ., python: 3.10}\n", contents=LOCKED).spec.environment
    assert found is not None
    assert (found.uv, found.python, found.fetch) == ("/home/me/llm", "3.10", "head")


def test_a_requirements_file_can_be_named_itself(parse_text: Callable[..., LoadedClusterFile]) -> None:
    found = parse_text(HEAD + "environment: {uv: gpu.txt}\n", contents={"gpu.txt": "torch"}).spec.environment
    assert found is not None
    assert found.uv == "/home/me/llm/gpu.txt"


def test_a_container_keeps_the_python_of_a_host_and_its_nodes_pull_by_default(
    parse_text: Callable[..., LoadedClusterFile],
) -> None:
    text = "environment: {container: {image: a/b, mounts: /data}}\ndefaults: {python: /opt/bin/python}\n"
    spec = parse_text(HEAD + text).spec
    assert spec.environment is not None
    assert spec.environment.container == ContainerSpec(image="a/b", mounts=("/data",))
    assert (spec.environment.fetch, spec.hosts[0].python) == ("auto", "/opt/bin/python")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("environment: {uv: .}\n", "has neither `uv.lock` nor `requirements.txt`", id="no lock"),
        pytest.param("environment: {venv: .venv}\n", "has neither `pyvenv.cfg` nor `conda-meta/history`", id="no venv"),
        pytest.param("environment: {python: '3.11'}\n", "one of `uv`, `venv`, `container` is missing", id="no source"),
        pytest.param("environment: {uv: a, venv: b}\n", "`uv` and `venv` exclude each other", id="two sources"),
        pytest.param("environment: {uv: ., python: 3}\n", "is not a version such as `3.11`", id="version"),
        pytest.param("environment: {uv: ., python: '>=3.11'}\n", "is not a version such as `3.11`", id="range"),
        pytest.param("environment: {uv: ., fetch: nodes}\n", "fetch", id="fetch"),
        pytest.param(
            "environment: {uv: a, container: {image: b}}\n", "`uv` and `container` exclude each other", id="with uv"
        ),
        pytest.param("environment: {container: {args: [-v]}}\n", "the key `image` is missing", id="no image"),
        pytest.param("environment: {container: {image: a, runtime: lxc}}\n", "runtime", id="runtime"),
        pytest.param("environment: {container: pytorch}\n", "must be a mapping", id="image alone"),
        pytest.param("environment: {pip: .}\n", "pip: unknown key", id="unknown key"),
        pytest.param("environment: .\n", "must be a mapping", id="text"),
    ],
)
def test_a_mistake_in_an_environment_gets_one_message(
    text: str, words: str, parse_text: Callable[..., LoadedClusterFile]
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_text(HEAD + text)
    assert [words in p.text for p in caught.value.problems] == [True], caught.value.problems


def test_an_environment_and_a_python_of_a_host_exclude_each_other(parse_text: Callable[..., LoadedClusterFile]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_text(HEAD + "environment: {uv: .}\ndefaults: {python: /usr/bin/python3}\n", contents=LOCKED)
    assert [(p.line, p.text) for p in caught.value.problems] == [
        (5, "python: this key and `environment` exclude each other")
    ]


@pytest.mark.parametrize(
    ("text", "is_told"),
    [
        pytest.param("", True, id="nothing set"),
        pytest.param("environment: {uv: .}\n", False, id="environment"),
        pytest.param("defaults: {python: /opt/py/bin/python}\n", False, id="python"),
    ],
)
def test_a_folder_with_a_lock_and_no_setting_is_told_what_would_use_the_lock(
    text: str, is_told: bool, parse_text: Callable[..., LoadedClusterFile]
) -> None:
    warnings = parse_text(HEAD + text, contents=LOCKED).warnings
    assert [("`uv.lock`" in w.text, "environment: {uv: .}" in (w.hint or "")) for w in warnings] == [
        (True, True)
    ] * is_told


@pytest.mark.parametrize(
    ("prologue", "name"),
    [
        ("pip install -r requirements.txt", "pip"),
        ("module load cuda; python -m venv x && x/bin/pip -q install torch", None),
        ("uv sync", "uv"),
        ("uv pip install --no-deps .", "uv"),
        ("conda env create -f environment.yml", "conda"),
        ("apt-get -y install libfoo", "apt-get"),
        ("conda activate llm", None),
        ("module load cuda", None),
        ("source ~/pip/activate", None),
    ],
)
def test_a_prologue_that_installs_gets_a_warning(
    prologue: str, name: str | None, parse_text: Callable[..., LoadedClusterFile]
) -> None:
    text = f"version: 1\nhosts: [a, b]\njob:\n  script: train.py\n  prologue: {prologue!r}\n"
    found = [w.text for w in parse_text(text).warnings if "installs for each worker" in w.text]
    assert [f"`{name}`" in text for text in found] == ([True] if name else [])
