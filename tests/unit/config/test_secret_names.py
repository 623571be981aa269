"""What looks like a secret and stands where everything is stored and shown is doubted once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from clusterctl.config.loader import LoadedClusterFile


@pytest.mark.parametrize(
    ("text", "name"),
    [
        pytest.param("hosts: a\nenv: {HF_TOKEN: x, API_KEY: y}\n", "HF_TOKEN", id="env"),
        pytest.param("hosts: {a: {env: {db_password: x}}}\n", "db_password", id="host"),
        pytest.param("hosts: [{host: a, env: {CLIENT_SECRET: x}}]\n", "CLIENT_SECRET", id="host-in-a-list"),
        pytest.param("hosts: a\ndefaults: {env: {AWS_SECRET_ACCESS_KEY: x}}\n", "AWS_SECRET_ACCESS_KEY", id="defaults"),
        pytest.param("hosts: a\nenv: {TOKENIZERS_PARALLELISM: 'false', KEYS: 1, MAX_TOKENS: 8}\n", None, id="none"),
        pytest.param("hosts: a\nsecrets: {HF_TOKEN: {env: HOME}}\n", None, id="a-secret"),
    ],
)
def test_a_name_like_a_secrets_in_env_is_warned_of_once(
    parse_text: Callable[..., LoadedClusterFile], text: str, name: str | None
) -> None:
    warnings = parse_text(f"version: 1\n{text}").warnings
    assert len(warnings) == (name is not None)
    for warning in warnings:
        assert f"`{name}`" in warning.text
        assert warning.hint == f"write `secrets: {{{name}: {{env: {name}}}}}`"
