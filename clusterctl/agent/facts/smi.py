"""`nvidia-smi` as the second source, asked only where NVML itself could not be used."""

from __future__ import annotations

import subprocess
import time
from typing import Any

from clusterctl.agent.facts.children import AbsentError

_QUERY = "index,uuid,name,pci.bus_id,driver_version"


def collect(deadline: float) -> dict[str, Any]:
    """Return the group `smi`.

    Raises:
        AbsentError: There is no `nvidia-smi`.
    """
    argv = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            argv, capture_output=True, check=False, timeout=max(0.1, deadline - time.monotonic() - 0.1)
        )
    except FileNotFoundError as error:
        raise AbsentError("there is no `nvidia-smi`") from error
    devices, errors = [], []
    for line in done.stdout.decode(errors="replace").splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) == 5 and words[0].isdigit():
            index, uuid, name, pci, driver = words
            devices.append({"index": int(index), "uuid": uuid, "name": name, "pci": pci.lower(), "driver": driver})
        elif line.strip():
            errors.append(line.strip())
    errors += [line.strip() for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
    return {"rc": done.returncode, "devices": devices, "errors": errors[:10]}
