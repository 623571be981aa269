"""A spec that a program makes from objects has the texts of the program."""

from __future__ import annotations

import pytest

from clusterctl import api


@pytest.mark.parametrize("text", ["é", "😀", "a\u2028b", "a\x85b", "\\U0001f600", '"quoted"\n'], ids=ascii)
def test_a_text_of_a_document_is_the_same_in_the_spec(text: str) -> None:
    spec = api.make_spec({"hosts": "box", "sync": "none", "job": {"command": "true"}, "env": {"TEXT": text}})

    assert spec.env["TEXT"] == text
