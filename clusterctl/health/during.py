"""What changes on a node while a run goes on, told once: debounced state changes from the sampler's samples.

Pure: time is each sample's own. A lost GPU, an uncorrected memory error or a hung driver is told at once or at the
second sample; heat and full disks only when they last. Every trouble that was told is told again when it is over.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from clusterctl.health import thermal
from clusterctl.health.context import Context
from clusterctl.health.gpus import error_name
from clusterctl.health.host import size
from clusterctl.health.judge import weigh
from clusterctl.health.model import Action, Finding, Status
from clusterctl.health.registry import LIMITS
from clusterctl.health.xid import NVLINK5, Event, judge_event

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

_GIB = 1024**3
_SILENT_SECONDS = 120.0
_SAMPLES_MISSED = 4
_TOLD_OTHERWISE = (154,)
"""XIDs whose meaning is in their text alone: the recovery action is read as a value too."""
_RECOVERY = {1: "a GPU reset", 2: "a reboot", 3: "draining P2P", 4: "drain and reset", 6: "a bus reset", 7: "a reboot"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long, in seconds, something has to last before it is told, and what counts as full.

    Attributes:
        slowdown: A slowdown by hardware or heat.
        stuck: A driver that does not answer.
        disk: A disk with less than `disk_least` bytes or `disk_share` of its size free.
        swing: How long a trouble must be away before it counts as over.
        silence: How long without any sample before the sampler counts as dead.
    """

    slowdown: float = 180.0
    stuck: float = 20.0
    disk: float = 30.0
    disk_least: float = 1.0 * _GIB
    disk_share: float = 0.05
    swing: float = 60.0
    silence: float = _SILENT_SECONDS

    @classmethod
    def of(cls, thresholds: Mapping[str, float], interval: float) -> Limits:
        """Return the limits of a cluster file: `health.thresholds: {during.slowdown: 60}`."""
        told = {key: float(thresholds[name]) for key in LIMITS if (name := f"during.{key}") in thresholds}
        # Rare samples are no silence.
        slow = {"silence": max(_SILENT_SECONDS, _SAMPLES_MISSED * interval)}
        return cls(**{**slow, **told})


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One thing to show once.

    Attributes:
        time: When it was certain, seconds since the epoch (the node's clock).
        check: The name of the check that would find it before a run.
        key: `check`, made finer where one check may find several things: `host.disk /`, `gpu.xid 79`.
        status: FAIL or WARN when it began, PASS when it is over.
        began: When it was first seen.
    """

    time: float
    node: str
    gpu: int | None
    check: str
    key: str
    status: Status
    message: str
    action: str
    began: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sign:
    """One trouble as one sample shows it.

    Attributes:
        check: With what makes it finer behind a blank.
        lasting: How long it has to be there before it is told.
        event: Something that happened; it is never over.
        rule: A name for `health.ignore` and `health.severity` that is finer than the check.
    """

    gpu: int | None
    check: str
    status: Status
    words: str
    lasting: float
    action: Action
    detail: str = ""
    event: bool = False
    rule: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trouble:
    sign: _Sign
    began: float
    seen: float
    told: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What is known of one node; `advance` gives the next one. Start with `Watch(node=...)`.

    Attributes:
        context: What is ignored, and weighed otherwise, by the cluster file.
        gpus: Those that the run uses; `None` for all.
    """

    node: str
    limits: Limits = field(default_factory=Limits)
    context: Context = field(default_factory=Context)
    gpus: Collection[int] | None = None
    last: float | None = None
    silent: bool = False
    ecc: Mapping[int, int] = field(default_factory=dict)
    troubles: Mapping[tuple[int | None, str], _Trouble] = field(default_factory=dict)


def advance(watch: Watch, sample: Mapping[str, Any]) -> tuple[Watch, list[Change]]:
    """Take in one sample (`clusterctl.agent.facts.sampler` has its shape); return what is to be told now."""
    now = float(sample["time"])
    changes: list[Change] = []
    if watch.silent:
        changes.append(_change(watch, now, _SILENCE, Status.PASS, "samples again", watch.last or now))
    signs = {(sign.gpu, sign.check): sign for sign in _signs(watch, sample)}
    troubles: dict[tuple[int | None, str], _Trouble] = {}
    for key, sign in signs.items():
        before = watch.troubles.get(key)
        trouble = _Trouble(
            sign=sign, began=before.began if before else now, seen=now, told=bool(before and before.told)
        )
        if not trouble.told and now - trouble.began >= sign.lasting:
            changes.append(_change(watch, now, sign, sign.status, _message(watch, trouble, now), trouble.began))
            trouble = replace(trouble, told=True)
        troubles[key] = trouble
    blind = sample.get("status") != "ok"
    for key, trouble in watch.troubles.items():
        if key in signs:
            continue
        # A sample that cannot see GPUs says nothing about them, good or bad.
        if trouble.sign.event or (blind and key[0] is not None):
            troubles[key] = replace(trouble, seen=now)
        elif trouble.told and now - trouble.seen < watch.limits.swing:
            troubles[key] = trouble
        elif trouble.told:
            lasted = _duration(trouble.seen - trouble.began)
            message = f"{_place(watch, trouble.sign)}{trouble.sign.words} is over after {lasted}"
            changes.append(_change(watch, now, trouble.sign, Status.PASS, message, trouble.began))
    after = replace(watch, last=now, silent=False, troubles=troubles, ecc=_first_ecc(watch, sample))
    return after, changes


def tick(watch: Watch, now: float) -> tuple[Watch, list[Change]]:
    """Notice that samples have stopped. Call it now and then, with the same clock that samples carry."""
    if watch.silent or watch.last is None or now - watch.last < watch.limits.silence:
        return watch, []
    message = f"{watch.node}: no sample of GPUs and host for {_duration(now - watch.last)}"
    return replace(watch, silent=True), [_change(watch, now, _SILENCE, Status.WARN, message, watch.last)]


def fold(node: str, samples: Iterable[Mapping[str, Any]], limits: Limits | None = None) -> list[Change]:
    """Return everything to be told about a node's samples, in order."""
    watch = Watch(node=node, limits=limits or Limits())
    changes: list[Change] = []
    for sample in samples:
        watch, told = advance(watch, sample)
        changes += told
    return changes


def troubled(watch: Watch) -> list[Change]:
    """Return what is wrong with the node by now, each as it would be told now."""
    now = watch.last or 0.0
    return [
        _change(watch, now, trouble.sign, trouble.sign.status, _message(watch, trouble, now), trouble.began)
        for trouble in watch.troubles.values()
        if trouble.told
    ]


def condemned(watch: Watch) -> str | None:
    """Return why the node should be left out of a restart, or `None`."""
    return next((change.message for change in troubled(watch) if change.status is Status.FAIL), None)


_SILENCE = _Sign(gpu=None, check="host.sampler", status=Status.WARN, words="samples", lasting=0.0, action=Action.NONE)


def _signs(watch: Watch, sample: Mapping[str, Any]) -> Iterator[_Sign]:
    for sign in _all_signs(watch, sample):
        check = sign.check.split(" ")[0]
        found = Finding(check=check, status=sign.status, message="", node=watch.node, gpu=sign.gpu, key=sign.rule)
        weighed = weigh(found, watch.context)
        if not weighed.ignored:
            yield replace(sign, status=weighed.status)


def _all_signs(watch: Watch, sample: Mapping[str, Any]) -> Iterator[_Sign]:
    yield from _disk_signs(watch, sample)
    if watch.gpus is not None and not watch.gpus:
        return
    yield from _driver_signs(watch, sample)
    for gpu in sample.get("gpus") or []:
        if _ours(watch, gpu["gpu"]):
            yield from _gpu_signs(watch, gpu)
    for xid in sample.get("xids") or []:
        if _ours(watch, xid["gpu"]):
            yield from _xid_signs(xid["gpu"], int(xid["xid"]))


def _ours(watch: Watch, gpu: int | None) -> bool:
    return watch.gpus is None or gpu is None or gpu in watch.gpus


def _driver_signs(watch: Watch, sample: Mapping[str, Any]) -> Iterator[_Sign]:
    if sample.get("status") == "stuck":
        where = f" in {sample['wchan']}" if sample.get("state") == "D" and sample.get("wchan") else ""
        # The sampler knows for how long: no need to wait once more for as long.
        lasting = 0.0 if float(sample.get("stuck_s") or 0) >= watch.limits.stuck else watch.limits.stuck
        words = f"the GPU driver hangs{where}"
        detail = f"no answer for {_duration(float(sample.get('stuck_s') or 0))}"
        yield _sign(None, "gpu.responsive", Status.FAIL, words, lasting, Action.REBOOT_NODE, detail)
    elif sample.get("status") == "error":
        words = f"GPUs cannot be watched: {sample.get('reason')}"
        yield _sign(None, "gpu.driver", Status.WARN, words, watch.limits.stuck, Action.NONE)


def _disk_signs(watch: Watch, sample: Mapping[str, Any]) -> Iterator[_Sign]:
    limits = watch.limits
    for disk in sample.get("disk") or []:
        if disk["free"] < limits.disk_least or disk["free"] < limits.disk_share * disk["total"]:
            words, detail = f"{disk['path']} is nearly full", f"{size(disk['free'])} free"
            check = f"host.disk {disk['path']}"
            yield _sign(None, check, Status.WARN, words, limits.disk, Action.FREE_SPACE, detail)


def _gpu_signs(watch: Watch, gpu: Mapping[str, Any]) -> Iterator[_Sign]:
    index = int(gpu["gpu"])
    if gpu.get("error"):
        words = error_name(int(gpu["error"]))
        yield _sign(index, "gpu.lost", Status.FAIL, words, 0.0, Action.REBOOT_NODE)
    asked = gpu.get("recovery_action")
    if asked:
        words = f"the driver asks for {_RECOVERY.get(asked, f'action {asked}')}"
        yield _sign(index, "gpu.recovery_action", Status.FAIL, words, 0.0, Action.RESET_GPU)
    more = (gpu.get("ecc_unc") or 0) - watch.ecc.get(index, gpu.get("ecc_unc") or 0)
    if more > 0:
        words = "uncorrected memory errors"
        yield _sign(index, "gpu.ecc_uncorrected", Status.FAIL, words, 0.0, Action.RESET_GPU, f"{more} since the start")
    if gpu.get("remap_failure"):
        yield _sign(index, "gpu.remap_failure", Status.FAIL, "row remapping failed", 0.0, Action.RMA)
    yield from _slow_signs(watch, index, gpu)


def _xid_signs(gpu: int | None, code: int) -> Iterator[_Sign]:
    hard, action, meaning = judge_event(Event(code, pci="", text="", age_s=0.0))
    if code in _TOLD_OTHERWISE:
        return
    # What tells the fatal ones of these apart is only in the kernel log.
    words = f"XID {code}, {'NVLink error' if code in NVLINK5 else meaning}"
    status = Status.FAIL if hard else Status.WARN
    yield _Sign(
        gpu=gpu,
        check=f"gpu.xid {code}",
        status=status,
        words=words,
        lasting=0.0,
        action=action,
        event=True,
        rule=f"xid.{code}",
    )


def _slow_signs(watch: Watch, index: int, gpu: Mapping[str, Any]) -> Iterator[_Sign]:
    bits, degrees = int(gpu.get("throttle") or 0), gpu.get("temp_c")
    detail = f"{degrees:.0f} °C" if degrees is not None else ""
    lasting = watch.limits.slowdown
    if thermal.reasons(bits):
        words = thermal.reasons(bits)
        yield _sign(index, "gpu.throttle_hw", Status.WARN, words, lasting, Action.CHECK_POWER_COOLING, detail)
    elif bits & thermal.SW_THERMAL:
        words = "thermal slowdown"
        yield _sign(index, "gpu.throttle_sw", Status.WARN, words, lasting, Action.CHECK_POWER_COOLING, detail)


def _sign(
    gpu: int | None, check: str, status: Status, words: str, lasting: float, action: Action, detail: str = ""
) -> _Sign:
    return _Sign(gpu=gpu, check=check, status=status, words=words, lasting=lasting, action=action, detail=detail)


def _first_ecc(watch: Watch, sample: Mapping[str, Any]) -> dict[int, int]:
    """Keep each GPU's first count: what was there before the run is another check's business."""
    counts = {g["gpu"]: g["ecc_unc"] for g in sample.get("gpus") or [] if g.get("ecc_unc") is not None}
    return {**counts, **watch.ecc}


def _place(watch: Watch, sign: _Sign) -> str:
    return f"{watch.node} GPU {sign.gpu}: " if sign.gpu is not None else f"{watch.node}: "


def _message(watch: Watch, trouble: _Trouble, now: float) -> str:
    sign = trouble.sign
    lasting = f" for {_duration(now - trouble.began)}" if sign.lasting and now > trouble.began else ""
    detail = f", {sign.detail}" if sign.detail else ""
    return f"{_place(watch, sign)}{sign.words}{lasting}{detail}"


def _change(watch: Watch, now: float, sign: _Sign, status: Status, message: str, began: float) -> Change:
    text = message if message.startswith(watch.node) else f"{watch.node}: {message}"
    action = Action.NONE if status is Status.PASS else sign.action
    check = sign.check.split(" ")[0]
    return Change(
        time=now,
        node=watch.node,
        gpu=sign.gpu,
        check=check,
        key=sign.check,
        status=status,
        message=text,
        action=action.value,
        began=began,
    )


def _duration(seconds: float) -> str:
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
