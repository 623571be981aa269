"""As many threads as the environment says: libraries read it when they are loaded, and the zygote has them take one."""

from __future__ import annotations

import ctypes
import os
import sys

# Not from `typing`: in a Python that is to be like a worker's, less is better.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

NAMES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")
"""What each library asks, some of them only where they are not told by a name of their own."""
_BLAS = (
    "openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "scipy_openblas_set_num_threads64_",
)


def settle() -> None:
    """Let every library that is loaded have the threads that a fresh start in this environment would give it."""
    openmp = _number("OMP_NUM_THREADS")
    for path, library in _loaded():
        name = os.path.basename(path)
        if name.startswith(("libgomp", "libomp", "libiomp")):
            _call(library, ("omp_set_num_threads",), openmp)
        elif "openblas" in name:
            wanted = _number("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
            # By itself it takes no more than there are processors.
            _call(library, _BLAS, min(wanted, len(os.sched_getaffinity(0))))
        elif name.startswith("libblis"):
            _call(library, ("bli_thread_set_num_threads",), _number("BLIS_NUM_THREADS", "OMP_NUM_THREADS"))
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(_as_mkl_says(torch) or openmp)


def _as_mkl_says(torch: Any) -> int | None:
    """Return the threads that torch takes by itself: as many as MKL allows, which knows the cores."""
    path = os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so")
    if not torch.backends.mkl.is_available() or not os.path.isfile(path):
        return None
    library = ctypes.CDLL(path)
    number = _number("MKL_NUM_THREADS", "OMP_NUM_THREADS")
    if not hasattr(library, "mkl_serv_set_num_threads") or not hasattr(library, "mkl_serv_get_max_threads"):
        return number
    library.mkl_serv_set_num_threads(ctypes.c_int(number))
    return int(library.mkl_serv_get_max_threads())


def _number(*names: str) -> int:
    for name in names:
        word = os.environ.get(name, "").partition(",")[0].strip()
        if word.isdigit() and int(word) > 0:
            return int(word)
    return len(os.sched_getaffinity(0))


def _loaded() -> Iterator[tuple[str, Any]]:
    with open("/proc/self/maps") as file:
        paths = {line.split(None, 5)[5].strip() for line in file if line.count("/") and ".so" in line}
    for path in sorted(paths):
        if any(word in os.path.basename(path) for word in ("gomp", "omp", "blas", "blis")):
            try:
                yield path, ctypes.CDLL(path)
            except OSError:
                continue


def _call(library: Any, names: tuple[str, ...], number: int) -> None:
    for name in names:
        function = getattr(library, name, None)
        if function is not None:
            function(ctypes.c_int(number))
            return
