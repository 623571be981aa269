"""Collects health facts of a node as JSON, in child processes with deadlines, so a hung driver cannot block the probe.

The probe only reports; the head judges the facts. The probe starts like a worker (same Python, prologue, environment
and limits), so the probe sees the same limits, PATH and packages as the workers; groups that depend on none of these
come from a fork of the agent, without another Python. The probe never imports torch.

The request (every key is optional):

    {"root": "/",            prefix of /sys, /proc, /etc, /dev/shm and device nodes, for tests
     "deadline": 3.0,        time limit in seconds of every group that is not in "deadlines"
     "deadlines": {group: seconds},  longer limits, because a driver may have to start GPUs before the driver answers
     "groups": [name],       the groups to collect; default all
     "workdir": path,        the folder of the code
     "paths": [path],        more folders whose free space is reported (checkpoints)
     "mounts": [path],       mounts to test, besides the network mounts
     "peers": {node: address}, "ports": [port],
     "checkpoints": glob,    pattern of the checkpoints, relative to the workdir
     "expect_gpus": bool,    false: do not use the driver
     "node": name, "run": id,    the requester; the names of test files contain both values
     "salt": text}           a text that is hashed with every environment variable; equal for all nodes of one check

The answer is one object:

    {"schema": 1, "time": wall clock, "ms": whole duration, "groups": {name: result},
     "stuck": [{"group", "pid", "state", "wchan"}]}
    result: {"status": "ok" | "timeout" | "error" | "denied" | "absent", "reason": text or null, "data": {...}, "ms": n}
    after a timeout also "pid", "state" and "wchan" of the child, and "abandoned": true if SIGKILL did not end the child

Data of each group:

    driver      {module, proc_version, nouveau, modules: [name], nvswitches,
                pci: [{address, vendor, class, driver, minor, width, max_width, slot_width}],
                dev: [{path, readable}], imex: [{path, readable}], helper}
                pci: GPUs of NVIDIA, AMD, Intel (without the graphics in its processors) and Huawei (`ascend`)
                driver: the driver of the card; minor: the number of its device node; slot_width: lanes of the port
                above the card; helper: whether a program can create missing device nodes. Unknown values are null
    nvml        {init_error, init_ms, driver, cuda, cuda_error, nvml, count, count_error, uvm,
                p2p: [[i, j, nvlink, read]], devices: [{vendor, index, v: {...}, err: {field: word}, codes: {field: n},
                odd: {field: n}}]}
                uvm: result of opening /dev/nvidia-uvm; p2p: NVML's status of each pair of GPUs, 0 is good
                err: the error name of each missing value; codes: NVML's error numbers. An error that
                may be transient is in err only if three readings in a row had it, otherwise in odd
                v: uuid serial name pci subsystem vbios minor capability [major, minor] recovery_action
                temp temp_slowdown temp_max mem_temp mem_temp_max margin tlimit_{gpu_max,mem_max,slowdown,shutdown}
                throttle [sample...] power_w power_limit_w power_default_w pstate sm_clock sm_clock_max util
                pcie_width pcie_width_max pcie_gen pcie_gen_max nvlinks [0|1|null...]
                fabric {state, status, health, cluster, clique}
                ecc_mode [now, pending] ecc_default ecc_unc ecc_cor ecc_unc_aggregate sram {unc, threshold}
                remapped [cor, unc, pending, failure] rows {max, high, partial, low, none} retired [sbe, dbe]
                retired_pending inforom repair [channel, tpc] persistence
                mig [now, pending] compute_mode memory {used, total, version}
                procs [{pid, used, kind: compute | mps | graphics, comm, user, run, visible, agent}]
    amdgpu      {driver, count, hidden: GPUs that the device cgroup hides, dev: [{path, access: ok | absent | denied}],
                numa_balancing, devices: [{vendor, index, v: {...}, err: {field: word}, codes: {field: errno},
                odd: {field: errno}}]}    only if the kernel has AMD's compute driver; index: the GPU's number in HIP
                v: uuid serial name pci subsystem vbios minor gfx hive partition modes [compute, memory] util temp
                temp_max mem_temp mem_temp_max power_w power_limit_w power_default_w sm_clock pcie_width pcie_width_max
                memory procs ecc_unc ecc_cor    as for NVIDIA; temperatures are those of the hottest sensor of the chip
                ras {block: [uncorrectable, correctable]} bad_pages {retired, pending, failed}
                xgmi {index: [weight, maximum MB/s]} xgmi_links [0|1...] slowdown [cause that slows the clocks]
    hidden_gpus {gpus: [an entry of driver.pci, with node: result of opening its device node]}
                only if NVML shows fewer GPUs than the bus
    smi         {rc, devices: [{index, uuid, name, pci, driver}], errors: [text]}    only if NVML failed
    kernel_log  {source, uptime, since_s: age of the oldest line, dropped, lines: [{age_s, text}],
                events: [count of one kind of GPU error (`kernel_errors`)]}
    host        {boot_id, machine_id, netns, kernel, arch, distro, user, uptime, cpus, cpus_allowed, load1, mem_total,
                mem_available, swap_used, swap_rate, governors: {name: n}, preferences: {name: n}, frequency_driver,
                clocksource, clock_error, memlock, nofile, nproc, cgroup_mem_max, cgroup_mem_free, cpu_quota, pids_max,
                pids_free, shm: {total, free}, env: {name: value}, env_hashes: {name: hash}}
                a limit of null means "unlimited"; env has the values of harmless variables, and null for others;
                preferences: the choice between speed and power; clock_error: the maximum error of the clock, up to 16 s
    hardware    {pcie: [{address, of, correctable: {kind: n}, nonfatal, fatal}],
                memory: [{controller, corrected, uncorrected, seconds}]}    counts since boot; devices without
                counters are left out
    disk        {paths: [{path, what, total, free, used, inodes, inodes_free, readonly, writable, error}]}
    checkpoint  {path, bytes}    of the newest complete checkpoint; only if the request has `checkpoints`
    mounts      {paths: [{path, fs, device, status, reason, ms, state, wchan}], left_out}
    names       {hostname, addresses, error, peers: {node: {name, addresses, error}}}
    net         {interfaces: [{name, operstate, mtu, speed, virtual, address}],
                routes: {node: {source, interface, error}},
                ib: [{device, port, state, phys, rate, link_layer, gids, roce_v2, firmware, board, driver, pci, width,
                max_width, slot_width}]}
    ports       {ports: [{port, free, error, owner}]}
    procs       {runs: [{run, pid, comm}], dstate: [{pid, comm, wchan, gpu, stuck_s}], zombies, own_namespace,
                fabric_manager, time_daemon}    own_namespace: only a container's processes are visible
    machine     the machine's part of a sample (`machine_sampler`)             only on request
    gpus        the GPUs' part of a sample                                      only on request
    claims      {claims: [{user, user_name, gpus: [index], run, node, kind, name, note, head, since, until, workers,
                step, step_at}], left_out}    of the runs and reservations of all users (`claim_files`)
                                                                                only on request
    gpu_users   {status, reason, gpus: [{gpu, util, used, total, version, err, procs: [an entry of nvml's procs, with
                user_name, command, since: wall clock, start: ticks, cpu_s], left_out}]}    only on request
    versions    {python, executable, torch, torch_cuda, torch_hip, nccl, nccl_from, net_plugin, verbs, packages,
                packages_hash, names: {name: version}}    nccl_from: `package`, or the library's path; net_plugin:
                NCCL's network plugin; verbs: path of libibverbs, which NCCL needs for RDMA
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    # The import of `typing` would take a twentieth of the time of a probe.
    from collections.abc import Mapping
    from typing import Any, TextIO

    from clusterctl.agent.facts.child_tasks import Task
    from clusterctl.agent.protocol.command_payload_types import FactGroup, Facts, FactsRequest, StuckProcess

SCHEMA = 1
DEFAULT_DEADLINE_S = 3.0
_SECOND_ROUND_S = 2.0
"""The second round of groups gets at least so many seconds."""

_ON_REQUEST = {
    "machine": ("machine_sampler", "sample_machine"),
    "gpus": ("machine_sampler", "sample_gpus"),
    "claims": ("claim_files", "collect_claims"),
    "gpu_users": ("gpu_users", "collect_gpu_users"),
}
"""Module and function of each group that no health check uses; a probe collects these groups only on request."""

_KFD = "/sys/class/kfd/kfd/topology"
SHARED_CHILD_GROUPS = (("driver", "hardware", "host", "ports", "procs"), ("names", "net"))
"""Sets of groups; the groups of a set run in one child process. The groups of the first set read tables of the kernel,
which do not hang. The groups of the second set wait for the same name server.
"""


def needs_worker_environment(request: FactsRequest) -> bool:
    """Return whether facts of the request depend on the Python, the variables or the limits of a worker."""
    chosen = request.get("groups")
    return not chosen or any(name not in _ON_REQUEST for name in chosen)


def collect_facts(request: FactsRequest) -> Facts:
    """Collect the facts of this node that are ready before the deadlines of the request.

    Call this function from a process with a single thread, because the function forks.
    """
    children = importlib.import_module("clusterctl.agent.facts.child_tasks")
    began = time.monotonic()
    deadline = began + float(request.get("deadline") or DEFAULT_DEADLINE_S)
    own = request.get("deadlines") or {}
    later = {name: max(deadline, began + float(seconds)) for name, seconds in own.items()}
    chosen = request.get("groups")
    tasks = {name: task for name, task in _make_tasks(request, deadline).items() if not chosen or name in chosen}
    tasks.update({name: _make_task(*collector) for name, collector in _ON_REQUEST.items() if name in (chosen or ())})
    groups: dict[str, FactGroup] = children.run_tasks(tasks, deadline, SHARED_CHILD_GROUPS, later)
    second = _choose_second_round(request, groups)
    if second:
        groups.update(children.run_tasks(second, max(deadline, time.monotonic() + _SECOND_ROUND_S)))
    stuck: list[StuckProcess] = [
        {"group": name, "pid": result["pid"], "state": result["state"], "wchan": result["wchan"]}
        for name, result in groups.items()
        if result["status"] == "timeout"
    ]
    elapsed = round((time.monotonic() - began) * 1000, 1)
    return {"schema": SCHEMA, "time": time.time(), "ms": elapsed, "groups": groups, "stuck": stuck}


def _choose_second_round(request: FactsRequest, groups: Mapping[str, FactGroup]) -> dict[str, Task]:
    """Return the tasks of the second round, which depend on the results of the first round."""
    chosen, nvml, driver = request.get("groups"), groups.get("nvml"), groups.get("driver")
    if nvml is not None and "smi" in (chosen or ["smi"]):
        # The output of `nvidia-smi` helps if NVML has failed. With a hung driver, `nvidia-smi` would hang too.
        has_failed = nvml["status"] != "ok" or nvml["data"].get("init_error") is not None
        if has_failed and nvml["status"] not in ("absent", "timeout"):
            return {"smi": _make_task("kernel_gpu_facts", "collect_nvidia_smi")}
    if nvml is None or driver is None or nvml["status"] != "ok" or driver["status"] != "ok":
        return {}
    module = importlib.import_module("clusterctl.agent.facts.kernel_gpu_facts")
    entries = module.find_hidden_gpus(driver["data"], nvml["data"])
    root = str(request.get("root") or "/")
    return {"hidden_gpus": _make_task("kernel_gpu_facts", "collect_hidden_gpus", root, entries)} if entries else {}


def _make_task(module: str, function: str, *arguments: Any) -> Task:
    def collect_group() -> Mapping[str, object]:
        # This import runs in the child, so each child imports only the modules of its own groups.
        collector = getattr(importlib.import_module(f"clusterctl.agent.facts.{module}"), function)
        facts: Mapping[str, object] = collector(*arguments)
        return facts

    return collect_group


def _make_tasks(request: FactsRequest, deadline: float) -> dict[str, Task]:
    root = str(request.get("root") or "/")
    wanted, peers = request.get("expect_gpus") is not False, request.get("peers") or {}
    workdir, checkpoints = request.get("workdir"), request.get("checkpoints")
    requester = "-".join(str(request[key]) for key in ("node", "run") if request.get(key))
    optional: dict[str, Task] = {}
    # Start no child for AMD GPUs on a machine without AMD's driver.
    if os.path.isdir(root.rstrip("/") + _KFD):
        optional["amdgpu"] = _make_task("amdgpu", "collect_amdgpu", root, wanted)
    if workdir and checkpoints:
        optional["checkpoint"] = _make_task("storage_facts", "collect_newest_checkpoint", workdir, checkpoints)
    return {
        "nvml": _make_task("nvml", "collect_nvml", root, wanted),
        **optional,
        "driver": _make_task("kernel_gpu_facts", "collect_driver", root),
        "kernel_log": _make_task("kernel_errors", "collect_kernel_log", root),
        "host": _make_task("host", "collect_host", root, str(request.get("salt") or "")),
        "hardware": _make_task("kernel_errors", "collect_hardware_errors", root),
        "disk": _make_task(
            "storage_facts", "collect_disks", root, workdir, request.get("paths") or [], requester, checkpoints
        ),
        "mounts": _make_task("storage_facts", "collect_mounts", root, request.get("mounts") or [], deadline),
        "names": _make_task("host_network", "collect_name_resolution", peers),
        "net": _make_task("host_network", "collect_network", root, peers),
        "ports": _make_task("host_network", "collect_port_states", request.get("ports") or [], root),
        "procs": _make_task("process_scan", "collect_processes", root),
        "versions": _make_task("host", "collect_versions", root),
    }


def main(stdin: TextIO, stdout: TextIO) -> int:
    """Read one request and write the facts as a line of JSON. Return 0, or 2 if the request is not a JSON object."""
    # A probe makes little garbage. A garbage collection would copy the memory that forked children share.
    gc.disable()
    # If the job sets PYTHONDONTWRITEBYTECODE, every probe would otherwise compile NVIDIA's bindings again.
    sys.dont_write_bytecode = False
    text = stdin.read()
    try:
        request: Any = json.loads(text) if text.strip() else {}
    except ValueError:
        request = None
    if not isinstance(request, dict):
        stdout.write(json.dumps({"schema": SCHEMA, "error": "the request is not a JSON object"}) + "\n")
        return 2
    stdout.write(json.dumps(collect_facts(request)) + "\n")  # type: ignore[arg-type]
    stdout.flush()
    return 0
