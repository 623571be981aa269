from __future__ import annotations

import io

import pytest

from clusterctl.render.console import Console, Terminal


class Screen:
    """What was written, and a terminal that writes there."""

    def __init__(self, *, width: int = 0, colour: bool = False, live: bool = False, unicode: bool = True) -> None:
        self.stream = io.StringIO()
        self.terminal = Terminal(self.stream, colour=colour, live=live, unicode=unicode, width=width)

        self.console = Console(Terminal(io.StringIO(), colour=False, live=False, unicode=True), self.terminal)

    @property
    def text(self) -> str:
        return self.stream.getvalue()


@pytest.fixture
def new_screen() -> type[Screen]:
    return Screen


@pytest.fixture
def pipe() -> Terminal:
    return Screen().terminal


@pytest.fixture
def narrow() -> Terminal:
    return Screen(width=80).terminal
