"""What a person chose on the command line, as one value a command."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clusterctl.cli import options

if TYPE_CHECKING:
    from collections.abc import Callable

    import click

    from clusterctl.render.console import Console


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The choices of a command: a field has the name of its option. These are `options.output_options`."""

    color: str
    quiet: bool

    def console(self) -> Console:
        """Return the console of this process, in the colours that were chosen."""
        return options.console_of(self.color)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChoices(Choices):
    """The choices of a command that works on a cluster file; these are `options.cluster_file`."""

    path: str | None
    files: tuple[str, ...]
    sets: tuple[str, ...]


def together(kind: Callable[..., Choices]) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Hand a command all its options as one value of this kind (after the context, where it takes that)."""

    def wrap(command: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(command)
        def with_choices(*context: click.Context, **chosen: Any) -> int:
            return command(*context, kind(**chosen))

        return with_choices

    return wrap
