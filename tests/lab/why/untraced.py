"""A node of an ordinary user who may trace nobody: py-spy gives nothing there."""

from __future__ import annotations

from typing import Final

from tests.lab.spec import NodeSpec

_REFUSED: Final = """#!/bin/sh
echo "Error: Permission Denied: Try running again with elevated permissions" >&2
exit 1
"""
"""What py-spy says where the kernel refuses it (Yama): a switch of the whole machine, which no test may turn."""


def node() -> NodeSpec:
    """Return what such a node is."""
    return NodeSpec(user="alice", programs={"py-spy": _REFUSED})
