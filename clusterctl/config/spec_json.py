"""A spec as JSON in the run directory, so that an adopting controller knows what the run was started with."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from typing import TYPE_CHECKING

from clusterctl.config.spec import ClusterSpec

if TYPE_CHECKING:
    from pydantic import TypeAdapter


def dump_spec(spec: ClusterSpec) -> str:
    """Return a spec as one line of JSON; it keeps the names of secrets, with empty values."""
    public = dataclasses.replace(spec, secrets=dict.fromkeys(spec.secrets, ""))
    return json.dumps(dataclasses.asdict(public), separators=(",", ":"))


def load_spec(text: str) -> ClusterSpec:
    """Return the spec that this or an earlier version dumped; missing keys have their defaults.

    Raises:
        ValueError: The text is not a stored spec.
    """
    return _adapter().validate_json(text)


@cache
def _adapter() -> TypeAdapter[ClusterSpec]:
    from pydantic import TypeAdapter

    return TypeAdapter(ClusterSpec)
