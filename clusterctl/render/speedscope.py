"""Shows the stacks of ranks as a file for www.speedscope.app. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from clusterctl.run.rules.stack_dump_parser import RankStack
from clusterctl.why.evidence_types import StackFrame

_SCHEMA = "https://www.speedscope.app/file-format-schema.json"


def build_speedscope(name: str, stacks: Iterable[RankStack]) -> dict[str, Any]:
    """Return a speedscope document. Each sample is a thread, so the width of a function is its number of ranks.

    The document has profiles of all main threads, of the main threads below the name of their rank, and of all other
    threads.

    Args:
        name: The name of the document.
        stacks: The stacks of the ranks.

    Returns:
        The document; `profiles` is empty if no rank has Python stacks.
    """
    frames: dict[StackFrame, int] = {}
    known = [(stack, thread) for stack in stacks for thread in stack.threads or ()]
    main = [thread.frames for _, thread in known if thread.is_main]
    other = [thread.frames for _, thread in known if not thread.is_main]
    by_rank = [(*thread.frames, StackFrame(f"rank {stack.rank}", "", 0)) for stack, thread in known if thread.is_main]
    titles = {"main threads": main, "main threads by rank": by_rank, "other threads": other}
    profiles = [_build_profile(title, samples, frames) for title, samples in titles.items() if samples]
    shared = [{"name": frame.function, "file": frame.file, "line": frame.line} for frame in frames]
    return {"$schema": _SCHEMA, "name": name, "shared": {"frames": shared}, "profiles": profiles}


def _build_profile(title: str, stacks: Sequence[Sequence[StackFrame]], frames: dict[StackFrame, int]) -> dict[str, Any]:
    """Return a profile with one sample for each stack; add unknown frames to `frames`, which numbers them."""
    samples = [[frames.setdefault(frame, len(frames)) for frame in reversed(stack)] for stack in stacks]
    return {
        "type": "sampled",
        "name": title,
        "unit": "none",
        "startValue": 0,
        "endValue": len(samples),
        "samples": samples,
        "weights": [1] * len(samples),
    }
