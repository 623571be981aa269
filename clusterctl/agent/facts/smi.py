"""`nvidia-smi` as the second source, asked only where NVML itself could not be used."""

from __future__ import annotations

from clusterctl.agent.facts import children
from clusterctl.agent.facts.children import AbsentError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from clusterctl.agent.protocol.types.found import gpus as shapes

_QUERY = "index,uuid,name,pci.bus_id,driver_version"


def collect() -> shapes.Smi:
    """Return the group `smi`.

    Raises:
        AbsentError: There is no `nvidia-smi`.
    """
    argv = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        code, output, complaint = children.output(argv)
    except FileNotFoundError as error:
        raise AbsentError("there is no `nvidia-smi`") from error
    devices: list[shapes.OfSmi] = []
    errors: list[str] = []
    for line in output.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) == 5 and words[0].isdigit():
            index, uuid, name, pci, driver = words
            devices.append({"index": int(index), "uuid": uuid, "name": name, "pci": pci.lower(), "driver": driver})
        elif line.strip():
            errors.append(line.strip())
    errors += [line.strip() for line in complaint.splitlines() if line.strip()]
    return {"rc": code, "devices": devices, "errors": errors[:10]}
