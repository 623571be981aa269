"""`make test`; then each test that failed once more, alone. A test that fails twice fails the suite.

Both results are shown: a test that passes alone is not well, but it does not hold up a change that has nothing to do
with it. Where the suite did not come to its end, or where so much fails that it cannot be chance, nothing is repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

CACHE = Path(".pytest_cache/v")
ONLY_TESTS_FAILED = 1
MOST = 10
RESERVE_SECONDS = 15.0


def main() -> int:
    """Return the exit code: 0 where every test has passed, at the latest alone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800.0, help="how long all of it may take")
    end = time.monotonic() + parser.parse_args().seconds - RESERVE_SECONDS
    try:
        shutil.rmtree(CACHE, ignore_errors=True)
        if _run(["make", "test"], end) == 0:
            return 0
        failed = _failed()
        if not failed:
            return _say("error: the suite did not come to its end")
        if len(failed) > MOST:
            return _say(f"error: {len(failed)} tests failed; more than {MOST} are not repeated")
        again = {test: _passes_alone(test, end) for test in failed}
    except subprocess.TimeoutExpired:
        return _say("error: the suite takes too long")
    print("\nfailed at first, then alone:")
    for test, passes in again.items():
        print(f"  {'passed' if passes else 'FAILED'}  {test}")
    return 0 if all(again.values()) else 1


def _failed() -> list[str]:
    """Return the tests that failed, or none where something else went wrong."""
    status, failed = CACHE / "clusterctl/exit_status", CACHE / "cache/lastfailed"
    if not (status.exists() and failed.exists()) or json.loads(status.read_text()) != ONLY_TESTS_FAILED:
        return []
    return list(json.loads(failed.read_text()))


def _passes_alone(test: str, end: float) -> bool:
    print(f"\nonce more, alone: {test}", flush=True)
    return _run([".venv/bin/python", "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", test], end) == 0


def _run(argv: list[str], end: float) -> int:
    """Run a command to its end; where time is over before, end it and all that it has started."""
    with subprocess.Popen(argv, start_new_session=True) as process:
        try:
            return process.wait(max(0.0, end - time.monotonic()))
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise


def _say(text: str) -> int:
    print(f"\n{text}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
