"""A spec as JSON in the run directory, so that an adopting controller knows what the run was started with."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import TYPE_CHECKING

from clusterctl.config.spec import ClusterSpec

if TYPE_CHECKING:
    from pydantic import TypeAdapter


@cache
def _adapter() -> TypeAdapter[ClusterSpec]:
    from pydantic import TypeAdapter

    return TypeAdapter(ClusterSpec)


def dump(spec: ClusterSpec) -> str:
    """Write a spec as one line of JSON; names of secrets are kept, their values are empty."""
    public = dataclasses.replace(spec, secrets=dict.fromkeys(spec.secrets, ""))
    return _adapter().dump_json(public).decode()


def load_stored(text: str) -> ClusterSpec:
    """Read what `dump` wrote.

    Raises:
        ValueError: The text is something else.
    """
    return _adapter().validate_json(text)
