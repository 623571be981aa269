"""Whether a node has what `job.framework` names, and whether its torch can use the GPUs that are declared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clusterctl.health.check import View, node_check
from clusterctl.health.checks import gpus
from clusterctl.health.model import Action, Outcome, fail, ok, skip, unknown, warn
from clusterctl.health.vendors import AMD, NVIDIA, VENDORS

if TYPE_CHECKING:
    from collections.abc import Iterator

_FAMILY = "Versions"
_PACKAGES = {
    "torch": ("torch",),
    "keras": ("keras", "torch"),
    "tensorflow": ("tensorflow", "tensorflow-cpu"),
    "jax": ("jax",),
}
"""What must be there for each framework. TensorFlow goes by several names, of which one will do."""
_ANY_OF = frozenset({"tensorflow"})
_SOURCE = "package metadata in the job's Python (nothing is imported)"


def _versions(view: View) -> dict[str, Any] | None:
    group = view.group("versions")
    return group.data if group.status == "ok" else None


@node_check(
    name="version.framework",
    family=_FAMILY,
    source=_SOURCE,
    threshold="what `job.framework` names is there",
    severity="FAIL",
    remedy="Install it on the node, or point `python` of the host at the environment that has it",
    action=Action.FIX_CONFIG,
    group="versions",
)
def installed(view: View) -> Iterator[Outcome]:
    """The job's Python has the framework that the cluster file names."""
    framework, data = view.context.framework, _versions(view)
    wanted = _PACKAGES.get(framework or "", ())
    if not wanted:
        yield skip("`job.framework` names none")
        return
    if data is None:
        yield unknown("could not ask for its packages")
        return
    names = data.get("names", {})
    there = [name for name in wanted if name in names]
    missing = [name for name in wanted if name not in names]
    if missing and not (framework in _ANY_OF and there):
        shown = missing[0] if framework in _ANY_OF else " and ".join(missing)
        where = data.get("executable") or "the job's Python"
        yield fail(f"no {shown} in {where}", expected=shown)
    else:
        yield ok(", ".join(f"{name} {names[name]}" for name in there))


@node_check(
    name="version.gpu_build",
    family=_FAMILY,
    source="torch/version.py in the job's Python (nothing is imported)",
    threshold=(
        "torch is built for the GPUs of the node (CUDA for NVIDIA's, ROCm for AMD's) where the cluster file declares "
        "some"
    ),
    severity="FAIL",
    remedy="Install a CUDA or ROCm build of torch on the node, or declare `gpus: 0` to train on its CPU",
    action=Action.FIX_CONFIG,
    group="versions",
)
def gpu_build(view: View) -> Iterator[Outcome]:
    """Torch can use the GPUs that the cluster file declares; a build for CPUs would leave them idle, without a word."""
    data, declared = _versions(view), view.expected.count
    torch = (data or {}).get("torch")
    if not declared or view.context.framework in ("tensorflow", "jax", "none"):
        yield skip("no GPUs declared" if not declared else "not a job for torch")
    elif data is None:
        yield unknown("could not ask for its packages")
    elif torch is None:
        yield skip("no torch here")
    else:
        # Where the file does not say that torch is what the job uses, the rest of an environment may hold it.
        say = fail if view.context.framework in ("torch", "keras") else warn
        built, there = _built_for(torch, data), _maker(view)
        if built is None:
            yield say(f"torch {torch} is built for CPUs alone, {declared} GPUs are declared", value=torch)
        elif there is not None and built != there:
            names = f"torch {torch} is built for GPUs of {VENDORS[built].name}"
            index = "rocm6.4" if there == AMD else "cu128"
            hint = f"`pip install torch --index-url https://download.pytorch.org/whl/{index}` (or another of its kind)"
            yield say(f"{names}, those of the node are {VENDORS[there].name}'s", value=torch, hint=hint)
        else:
            yield ok(f"torch {torch}")


def _built_for(torch: str, versions: dict[str, Any]) -> str | None:
    """Return whose GPUs a torch can use, or `None`. ROCm builds say so in their version; others of AMD's do not."""
    if "+rocm" in torch or versions.get("torch_hip"):
        return AMD
    if "+xpu" in torch:
        return "intel"
    return NVIDIA if versions.get("torch_cuda") else None


def _maker(view: View) -> str | None:
    """Return whose GPUs the node shows; `None` where it shows none, so that nothing can be said."""
    return gpus.vendor(view) if gpus.compute_cards(view) or gpus.all_gpus(view) else None


CHECKS = (installed, gpu_build)
