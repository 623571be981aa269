"""Becoming a rank: a fork gets all that a fresh start would have given it, and forgets what it shares."""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time

from . import image, late, state, threads

# Not from `typing`: in a Python that is to be like a worker's, less is better.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .target import Target

_SEED_OF_OLD_TORCH = 67280421310721
"""Where every process begins with this seed, ranks do, too; torch 2.13 draws one."""


def prepare(target: Target, env: dict[bytes, bytes], cwd: str) -> None:
    """Be what a fresh start would be, up to the first line of the script."""
    os.chdir(cwd)
    late.replace({**env, **state.changes})
    image.show([os.fsencode(word) for word in target.argv], env)
    image.name(os.path.basename(os.fsencode(target.argv[0])))
    importlib.invalidate_caches()
    _know_our_thread()
    _draw_anew()
    threads.settle()
    _go_to_the_end(sys.stdout)
    _go_to_the_end(sys.stderr)


def arm() -> None:
    """Arm the shim of clusterctl, as its `sitecustomize` does in a fresh start."""
    chain: Any = sys.modules.get("_clusterctl_chain")
    if chain is not None and hasattr(chain, "arm"):
        chain.arm()


def _know_our_thread() -> None:
    know = getattr(threading.main_thread(), "_set_native_id", None)
    if know is not None:
        know()


def _draw_anew() -> None:
    """Draw again what a fresh start draws by chance or of the clock; `random` does so by itself."""
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed()
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.initial_seed() != _SEED_OF_OLD_TORCH:
        torch.default_generator.seed()
    logging: Any = sys.modules.get("logging")
    if logging is not None:
        # `relativeCreated` counts from here: what is kept may have been imported an hour ago.
        logging._startTime = time.time_ns() if isinstance(logging._startTime, int) else time.time()  # noqa: SLF001
    process: Any = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.current_process().authkey = os.urandom(32)


def _go_to_the_end(stream: Any) -> None:
    """Know where the output stands: it is another file than the one that was there at the start."""
    try:
        stream.flush()
        if stream.seekable():
            stream.seek(0, os.SEEK_END)
    except (OSError, ValueError, AttributeError):
        return
