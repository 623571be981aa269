"""What the stall rule keeps of one rank: its last sample, and when it last did what."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clusterctl.agent.protocol.sample_types import ActivitySample, PhaseAge, RankActivity, WorkerStatusSample

# Below these a waiting worker's own threads (heartbeats, the status file) would count as work.
BUSY_CORES = 0.05
# On a crowded machine a rank that computes gets less than that, but could run nearly all the time; one that polls not.
RUNNABLE_SHARE = 0.5
TRANSFER_BYTES_S = 16 * 1024
# A main thread that comes back to Python this often, for that long, computes; one that polls every 5 s only waits.
FRESH_S, FRESH_FOR_S = 2.5, 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """The last sample of one rank, and when it last did what. Times are the head's."""

    node: str
    seen: float
    sampled: float
    alive: bool
    gpus: bool
    output: int | None = None
    transferred: int | None = None
    cpu_s: float = 0.0
    starved_s: float = 0.0
    beats: int = 0
    marker: object = None
    progress_at: float | None = None
    busy_at: float | None = None
    fresh_from: float | None = None
    fresh_at: float | None = None
    phase: tuple[str, float, float] | None = None
    frameworks: bool = False
    backend: str | None = None
    group_timeout: float | None = None
    collectives: int = 0


def look(before: RankView | None, content: RankActivity, sample: ActivitySample, node: str, now: float) -> RankView:
    """The view after one more sample.

    Args:
        before: The view so far, `None` at first.
        content: The rank's part of the sample.
        sample: The sample, for what is the node's.
        node: Which node it is of.
        now: When it arrived.
    """
    inside = content.get("inside")
    transfers = [moved for moved in (content.get("read"), content.get("written")) if moved is not None]
    view = RankView(
        node=node,
        seen=now,
        sampled=sample["m"],
        alive=bool(content.get("alive")),
        gpus=bool(sample.get("gpus")),
        output=content.get("output"),
        transferred=sum(transfers) if transfers else None,
        cpu_s=content.get("cpu_s") or 0.0,
        starved_s=content.get("starved_s") or 0.0,
        beats=inside.get("beats") or 0 if inside else 0,
        marker=(inside.get("pid"), inside.get("beats"), inside.get("seq")) if inside else None,
        collectives=sum(begun for begun, _ in (inside.get("seq") or {}).values()) if inside else 0,
        phase=_phase(inside.get("phase"), now) if inside else None,
        frameworks=bool(inside and inside.get("frameworks")),
        backend=inside.get("backend") if inside else None,
        group_timeout=inside.get("timeout_s") if inside else None,
    )
    return _with_main_thread(_with_moments(view, before, inside, now), before, inside, now)


def _phase(phase: PhaseAge | None, now: float) -> tuple[str, float, float] | None:
    return None if phase is None else (str(phase["name"]), now - phase["age_s"], float(phase["limit_s"]))


def _with_moments(view: RankView, before: RankView | None, inside: WorkerStatusSample | None, now: float) -> RankView:
    """When the rank last progressed and was last busy."""
    progress_at = before.progress_at if before else None
    age = inside.get("progress_age_s") if inside else None
    if age is not None and (before is None or before.marker != view.marker):
        progress_at = max(now - age, progress_at or now - age)
    busy_at = before.busy_at if before else None
    if before is not None and _busy(before, view):
        busy_at = now
    return replace(view, progress_at=progress_at, busy_at=busy_at)


def _busy(before: RankView, view: RankView) -> bool:
    """Whether a rank computed between two views, or would have if it had been given a processor."""
    seconds = view.sampled - before.sampled
    spent, starved = view.cpu_s - before.cpu_s, view.starved_s - before.starved_s
    return spent >= BUSY_CORES * seconds or spent + starved >= RUNNABLE_SHARE * seconds


def _with_main_thread(
    view: RankView, before: RankView | None, inside: WorkerStatusSample | None, now: float
) -> RankView:
    """Since when its main thread has kept coming back to Python, and when it last did so steadily."""
    main_age = inside.get("main_age_s") if inside else None
    file_age = inside.get("age_s") if inside else None
    if main_age is None or file_age is None or max(main_age, file_age) > FRESH_S:
        return replace(view, fresh_from=None, fresh_at=before.fresh_at if before else None)
    since = now if before is None or before.fresh_from is None else before.fresh_from
    fresh_at = now if now - since >= FRESH_FOR_S else (before.fresh_at if before else None)
    return replace(view, fresh_from=since, fresh_at=fresh_at)


def active(before: RankView, view: RankView) -> bool:
    """Whether output or transfers went on between two views."""
    if (view.output or 0) > (before.output or 0):
        return True
    moved = (view.transferred or 0) - (before.transferred or 0)
    return moved >= TRANSFER_BYTES_S * (view.sampled - before.sampled)
