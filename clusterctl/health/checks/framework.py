"""The framework of the job: whether it imports, sees the GPUs, and fits the driver and the other nodes."""

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
"""The packages that each framework needs. TensorFlow has several; one of these is enough."""
_ANY_OF = frozenset({"tensorflow"})


@remedy(Action.FIX_CONFIG, "Install it on the node, or point `python` of the host at the environment that has it")
@node_check("version.framework", _FAMILY, group="versions")
def check_framework_installed(node: CheckedNode) -> Outcome:
    """The job's Python has the framework that the cluster file names.

    Source: package metadata in the job's Python (nothing is imported)
    Healthy: what `job.framework` names is there
    """
    framework, versions = node.settings.framework, node.group().facts
    wanted, names = _PACKAGES.get(framework or "", ()), versions.get("names", {})
    if not wanted:
        return skip("`job.framework` names none")
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

    A build for CPUs would ignore them silently.

    Source: torch/version.py in the job's Python (nothing is imported)
    Healthy: torch is built for the GPUs of the node (CUDA for NVIDIA's, ROCm for AMD's) if the cluster file declares
        some
    """
    versions, framework, declared = node.group().facts, node.settings.framework, node.declaration.gpu_count
    torch = versions.get("torch")
    if not declared or framework in ("tensorflow", "jax", "none"):
        return skip("not a job for torch" if declared else "no GPUs declared")
    if torch is None:
        return skip("no torch here")
    # If the file does not say that the job uses torch, other frameworks of the environment may use the GPUs.
    say = fail if framework in ("torch", "keras") else warn
    built, maker = _built_for(torch, versions), _find_gpu_vendor(node)
    if built is None:
        return say(f"torch {torch} is built for CPUs alone, {declared} GPUs are declared", value=torch)
    if maker is None or built == maker:
        return ok(f"torch {torch}")
    names = f"torch {torch} is built for GPUs of {VENDORS[built].name}"
    index = "rocm6.4" if maker == AMD else "cu128"
    hint = f"`pip install torch --index-url https://download.pytorch.org/whl/{index}` (or another of its kind)"
    return say(f"{names}, those of the node are {VENDORS[maker].name}'s", value=torch, hint=hint)


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


# --- Whether the framework's CUDA can run here: on this driver, and on these GPUs.

_DRIVERS = {11: 450, 12: 525, 13: 580}
"""The oldest driver branch for each major CUDA: NVIDIA, CUDA compatibility, minor version compatibility."""
_FIRST_CUDA = {8: (11, 0), 9: (11, 8), 10: (12, 8), 11: (13, 0), 12: (12, 8)}
"""The first CUDA that makes code for GPUs of a major compute capability (release notes of the CUDA toolkit)."""
_LAST_CUDA = ((3, 11), (7, 12))
"""Major compute capability up to which a major CUDA is the last that makes code for it: CUDA 12 has dropped Kepler,
CUDA 13 all before Turing (7.5)."""
_TURING = (7, 5)
_OWN_BUILD = re.compile(r"\d(?:a|b|rc|\.dev)\d|\+git")
"""Versions of builds that one makes or gets from a vendor: they may carry code that a driver translates."""
_LIBRARY_NOT_FOUND = 12
_OTHER_FRAMEWORKS = frozenset({"jax", "tensorflow", "tensorflow-cpu"})


@dataclass(frozen=True, slots=True)
class _Build:
    """A framework and the CUDA that it is built for; a `minor` of `None` is not known."""

    name: str
    major: int
    minor: int | None

    @property
    def description(self) -> str:
        """What it is built for."""
        minor = "" if self.minor is None else f".{self.minor}"
        return f"{self.name} is built for CUDA {self.major}{minor}"


@remedy(
    Action.FIX_CONFIG,
    "Install a build of the framework for a CUDA that this driver and these GPUs run, or a newer driver",
)
@node_check("version.cuda_driver", "Versions", gpu=True, group="versions")
def check_cuda_driver_support(node: CheckedNode) -> Iterator[Outcome]:
    """The framework's CUDA starts on this driver and has code for these GPUs; else its first call ends the run.

    Source: CUDA that torch or JAX is built for (package metadata), CUDA of the driver and compute capability (NVML)
    Healthy: the driver supports the CUDA of the build: the same major version or a later one, as the driver's library
        in the job's environment reports it (a compatibility package counts). The build has code for every GPU of the
        run: CUDA 11.8 for sm_90, 12.8 for sm_100 and sm_120, less than 13 for sm_70 and older. WARN if the job may use
        another framework, or if the build is the user's own
    """
    nvml = node.group("nvml")
    build = _find_cuda_build(node)
    if isinstance(build, str):
        yield skip(build)
    elif nvml.status != "ok" or nvml.facts.get("init_error") is not None:
        yield unknown("the driver could not be asked for its CUDA")
    elif nvml.facts.get("cuda_error") == _LIBRARY_NOT_FOUND:
        yield warn(f"{build.description}, and there is no `libcuda.so.1`", hint=_NO_LIBRARY)
    elif (most := _read_newest_cuda(nvml.facts)) is None:
        yield unknown("the driver does not tell its CUDA")
    else:
        yield from _judge_build(node, build, most)


_NO_LIBRARY = "Give a container the driver's compute libraries (`NVIDIA_DRIVER_CAPABILITIES=compute,utility`)"


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
    """Yield the GPUs for which the build has no code. Code of a major compute capability runs on its minor ones."""
    for device in gpu_facts.list_used_gpus(node):
        major, minor = gpu_facts.read_value(device, "capability") or (0, 0)
        first = _FIRST_CUDA.get(major, (0, 0))
        old = build.minor is not None and (build.major, build.minor) < first
        last = next((cuda for oldest, cuda in _LAST_CUDA if major <= oldest), build.major)
        dropped = major and build.major > last and (major, minor) < _TURING
        if old:
            why = f"CUDA {first[0]}.{first[1]} is the first that has it"
        elif dropped:
            why = f"CUDA {last} was the last that had it"
        else:
            continue
        code = f"sm_{major}{minor}"
        message = f"{gpu_facts.describe_gpu(device)}: {build.description}, without code for {code}; {why}"
        yield say(message, gpu=device["index"], value=code)


def _find_cuda_build(node: CheckedNode) -> _Build | str:
    """Return the framework and its CUDA, or why there is nothing to compare."""
    data, framework = node.group("versions").facts, node.settings.framework
    if framework in ("tensorflow", "none"):
        return f"`job.framework` is {framework}"
    if framework == "jax":
        plugins = {name: text for name, text in (data.get("names") or {}).items() if name.startswith("jax-cuda")}
        for name, text in plugins.items():
            return _Build(f"{name} {text}", int("".join(filter(str.isdigit, name))), None)
        return "no CUDA plugin of JAX here"
    if not data.get("torch_cuda"):
        return "no torch here" if not data.get("torch") else "torch is not built for CUDA"
    major, _, minor = str(data["torch_cuda"]).partition(".")
    return _Build(f"torch {data['torch']}", int(major), int(minor.split(".")[0] or 0))


def _read_newest_cuda(nvml: dict[str, Any]) -> tuple[int, int] | None:
    """Return the newest CUDA that the driver's library in the job's environment runs, a compatibility package's too."""
    if nvml.get("cuda"):
        return int(nvml["cuda"]) // 1000, int(nvml["cuda"]) % 1000 // 10
    branch = int(str(nvml.get("driver") or "0").split(".", maxsplit=1)[0])
    return next(((major, 0) for major, oldest in sorted(_DRIVERS.items(), reverse=True) if branch >= oldest), None)
