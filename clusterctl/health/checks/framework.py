"""Checks of the job's framework: installed, built for the GPUs, supported by the driver."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from clusterctl.health.check import CheckedNode, node_check, remedy
from clusterctl.health.checks import gpu_facts
from clusterctl.health.findings import AMD, NVIDIA, VENDORS, Action, Outcome, fail, ok, skip, unknown, warn

_FAMILY = "Versions"
_PACKAGES = {
    "torch": ("torch",),
    "keras": ("keras", "torch"),
    "tensorflow": ("tensorflow", "tensorflow-cpu"),
    "jax": ("jax",),
}
"""Framework to the packages that it needs. A framework in `_ANY_OF` needs only one of its packages."""
_ANY_OF = frozenset({"tensorflow"})


@remedy(
    Action.FIX_CONFIG, "Install it on the node, or set `python` of the host to the Python of an environment that has it"
)
@node_check("version.framework", _FAMILY, group="versions")
def check_framework_installed(node: CheckedNode) -> Outcome:
    """The job's Python has the framework that the cluster file names.

    Source: package metadata in the job's Python (nothing is imported)
    Healthy: the packages of `job.framework` are installed
    """
    framework, versions = node.settings.framework, node.group().facts
    wanted, names = _PACKAGES.get(framework or "", ()), versions.get("names", {})
    if not wanted:
        return skip("`job.framework` names no framework")
    missing = [name for name in wanted if name not in names]
    if not missing or (framework in _ANY_OF and len(missing) < len(wanted)):
        return ok(", ".join(f"{name} {names[name]}" for name in wanted if name in names))
    shown = missing[0] if framework in _ANY_OF else " and ".join(missing)
    where = versions.get("executable") or "the job's Python"
    return fail(f"no {shown} in {where}", expected=shown)


@remedy(
    Action.FIX_CONFIG, "Install a CUDA or ROCm build of torch on the node, or declare `gpus: 0` to train on its CPU"
)
@node_check("version.gpu_build", _FAMILY, group="versions")
def check_gpu_build(node: CheckedNode) -> Outcome:
    """Torch can use the GPUs that the cluster file declares.

    A build for CPUs would silently ignore GPUs.

    Source: torch/version.py in the job's Python (nothing is imported)
    Healthy: if the cluster file declares GPUs, torch is built for them: with CUDA for NVIDIA, with ROCm for AMD
    """
    versions, framework, declared = node.group().facts, node.settings.framework, node.declaration.gpu_count
    torch = versions.get("torch")
    if not declared or framework in ("tensorflow", "jax", "none"):
        return skip("not a job for torch" if declared else "no GPUs declared")
    if torch is None:
        return skip("torch is not installed")
    # If the cluster file does not name torch, another framework may use the GPUs.
    say = fail if framework in ("torch", "keras") else warn
    built, maker = _built_for(torch, versions), _find_gpu_vendor(node)
    if built is None:
        return say(f"torch {torch} is built for CPUs only, but {declared} GPUs are declared", value=torch)
    if maker is None or built == maker:
        return ok(f"torch {torch}")
    names = f"torch {torch} is built for GPUs of {VENDORS[built].name}"
    index = "rocm6.4" if maker == AMD else "cu128"
    hint = f"`pip install torch --index-url https://download.pytorch.org/whl/{index}` (or another of its kind)"
    return say(f"{names}, but the node has GPUs of {VENDORS[maker].name}", value=torch, hint=hint)


def _built_for(torch: str, versions: dict[str, Any]) -> str | None:
    """Return the vendor whose GPUs a build of torch can use, or `None`."""
    if "+rocm" in torch or versions.get("torch_hip"):
        return AMD
    if "+xpu" in torch:
        return "intel"
    return NVIDIA if versions.get("torch_cuda") else None


def _find_gpu_vendor(node: CheckedNode) -> str | None:
    """Return the vendor of the node's GPUs, or `None` if the node shows no GPU."""
    return gpu_facts.find_gpu_vendor(node) if gpu_facts.list_compute_cards(node) or gpu_facts.list_gpus(node) else None


# --- The framework's CUDA, the driver and the GPUs

_DRIVERS = {11: 450, 12: 525, 13: 580}
"""Major CUDA version to the oldest driver branch that supports this version (NVIDIA, CUDA minor version
compatibility)."""
_FIRST_CUDA = {8: (11, 0), 9: (11, 8), 10: (12, 8), 11: (13, 0), 12: (12, 8)}
"""Major compute capability to the first CUDA that compiles for this capability (release notes of the CUDA toolkit)."""
_LAST_CUDA = ((3, 11), (7, 12))
"""Pairs: a major compute capability, and the last major CUDA that compiles for this capability and older ones. CUDA 12
does not compile for Kepler, and CUDA 13 does not compile for GPUs before Turing (7.5)."""
_TURING = (7, 5)
_OWN_BUILD = re.compile(r"\d(?:a|b|rc|\.dev)\d|\+git")
"""Pattern of versions of builds by the user or a vendor. Such builds may contain PTX code, which the driver
compiles."""
_LIBRARY_NOT_FOUND = 12
_OTHER_FRAMEWORKS = frozenset({"jax", "tensorflow", "tensorflow-cpu"})


@dataclass(frozen=True, slots=True)
class _Build:
    """A framework and the CUDA version of its build; `minor` is `None` if it is not known."""

    name: str
    major: int
    minor: int | None

    @property
    def description(self) -> str:
        """The framework and its CUDA version, for messages."""
        minor = "" if self.minor is None else f".{self.minor}"
        return f"{self.name} is built for CUDA {self.major}{minor}"


@remedy(
    Action.FIX_CONFIG,
    "Install a build of the framework for a CUDA version that this driver and these GPUs support, or a newer driver",
)
@node_check("version.cuda_driver", "Versions", gpu=True, group="versions")
def check_cuda_driver_support(node: CheckedNode) -> Iterator[Outcome]:
    """The driver supports the CUDA version of the framework, and the framework has code for the GPUs of the run.

    Otherwise the first call of CUDA ends the run.

    Source: CUDA version of torch or JAX (package metadata), CUDA version of the driver and compute capability (NVML)
    Healthy: the driver's library in the job's environment supports the major CUDA version of the framework (also from a
        compatibility package). The framework has code for every GPU of the run: CUDA 11.8 for sm_90, 12.8 for sm_100
        and sm_120, less than 13 for sm_70 and older. WARN if the job may use another framework, or if the user built
        the framework
    """
    nvml = node.group("nvml")
    build = _find_cuda_build(node)
    if isinstance(build, str):
        yield skip(build)
    elif nvml.status != "ok" or nvml.facts.get("init_error") is not None:
        yield unknown("NVML did not report the CUDA version of the driver")
    elif nvml.facts.get("cuda_error") == _LIBRARY_NOT_FOUND:
        yield warn(f"{build.description}, but there is no `libcuda.so.1`", hint=_NO_LIBRARY)
    elif (most := _read_newest_cuda(nvml.facts)) is None:
        yield unknown("the driver does not report its CUDA version")
    else:
        yield from _judge_build(node, build, most)


_NO_LIBRARY = "Start the container with the driver's compute libraries (`NVIDIA_DRIVER_CAPABILITIES=compute,utility`)"


def _judge_build(node: CheckedNode, build: _Build, most: tuple[int, int]) -> Iterator[Outcome]:
    names = node.group("versions").facts.get("names") or {}
    unsure = node.settings.framework not in ("torch", "keras", "jax") and _OTHER_FRAMEWORKS & set(names)
    say = warn if unsure else fail
    limit = f"driver {node.group('nvml').facts.get('driver')} runs CUDA up to {most[0]}.{most[1]}"
    if build.major > most[0]:
        yield say(
            f"{build.description}, {limit}",
            value=build.major,
            expected=most[0],
            hint=_suggest_install(build.major, most[0]),
        )
        return
    missing = list(_find_gpus_without_code(node, build, warn if _OWN_BUILD.search(build.name) else say))
    yield from missing or [ok(f"{build.description}; {limit}")]


def _suggest_install(needed: int, there: int) -> str:
    wheels = {11: "cu118", 12: "cu128"}.get(there, f"cu{there}0")
    driver = _DRIVERS.get(needed, "a newer one")
    index = f"https://download.pytorch.org/whl/{wheels}"
    wheel = f"`pip install torch --index-url {index}`"
    return f"Install driver {driver} or later, or a build for CUDA {there} (torch: {wheel})"


def _find_gpus_without_code(node: CheckedNode, build: _Build, say: Callable[..., Outcome]) -> Iterator[Outcome]:
    """Yield an outcome for each GPU for which the framework has no code.

    Code for a major compute capability runs on all its minor versions.
    """
    for device in gpu_facts.list_used_gpus(node):
        major, minor = gpu_facts.read_value(device, "capability") or (0, 0)
        first = _FIRST_CUDA.get(major, (0, 0))
        old = build.minor is not None and (build.major, build.minor) < first
        last = next((cuda for oldest, cuda in _LAST_CUDA if major <= oldest), build.major)
        dropped = major and build.major > last and (major, minor) < _TURING
        if old:
            why = f"CUDA {first[0]}.{first[1]} is the first with this code"
        elif dropped:
            why = f"CUDA {last} is the last with this code"
        else:
            continue
        code = f"sm_{major}{minor}"
        message = f"{gpu_facts.describe_gpu(device)}: {build.description}, without code for {code}; {why}"
        yield say(message, gpu=device["index"], value=code)


def _find_cuda_build(node: CheckedNode) -> _Build | str:
    """Return the framework and its CUDA version, or a text that says why the version is not known."""
    data, framework = node.group("versions").facts, node.settings.framework
    if framework in ("tensorflow", "none"):
        return f"`job.framework` is {framework}"
    if framework == "jax":
        plugins = {name: text for name, text in (data.get("names") or {}).items() if name.startswith("jax-cuda")}
        for name, text in plugins.items():
            return _Build(f"{name} {text}", int("".join(filter(str.isdigit, name))), None)
        return "the CUDA plugin of JAX is not installed"
    if not data.get("torch_cuda"):
        return "torch is not installed" if not data.get("torch") else "torch is not built for CUDA"
    major, _, minor = str(data["torch_cuda"]).partition(".")
    return _Build(f"torch {data['torch']}", int(major), int(minor.split(".")[0] or 0))


def _read_newest_cuda(nvml: dict[str, Any]) -> tuple[int, int] | None:
    """Return the newest CUDA version that the driver's library in the job's environment supports, as (major, minor)."""
    if nvml.get("cuda"):
        return int(nvml["cuda"]) // 1000, int(nvml["cuda"]) % 1000 // 10
    branch = int(str(nvml.get("driver") or "0").split(".", maxsplit=1)[0])
    return next(((major, 0) for major, oldest in sorted(_DRIVERS.items(), reverse=True) if branch >= oldest), None)
