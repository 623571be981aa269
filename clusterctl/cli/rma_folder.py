"""Writes the folder that a vendor needs to replace a machine or a card (`health --rma`)."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.cli.node_command_runs import RemoteCommand
from clusterctl.cli.node_sessions import open_all_sessions
from clusterctl.config.spec import ClusterSpec, HostSpec
from clusterctl.errors import RefusedError
from clusterctl.health.findings import Finding, Status
from clusterctl.render.machine_history_table import histories_to_json
from clusterctl.render.start_progress import WaitingLine
from clusterctl.run.record.machine_ledger import MachineHistory
from clusterctl.run.record.redaction import redact_bytes
from clusterctl.run.rules.machine_history import RecordKind

if TYPE_CHECKING:
    from clusterctl.render.console import Terminal
    from clusterctl.render.exec_output import CommandResult

_TIMEOUT_S = 300.0
_BUG_REPORT = "nvidia-bug-report.log.gz"
_FILES = {
    "dmesg.txt": ("the end of the kernel log", "(dmesg || journalctl -k -b --no-pager) 2>/dev/null | tail -n 5000"),
    "nvidia-smi.txt": ("`nvidia-smi -q`", "command -v nvidia-smi >/dev/null && nvidia-smi -q"),
    "amd-smi.txt": ("`amd-smi static`", "command -v amd-smi >/dev/null && amd-smi static"),
    "machine.txt": (
        "kernel, driver, and devices on the PCI bus",
        "uname -a; cat /proc/driver/nvidia/version 2>/dev/null; lspci -vv 2>/dev/null; true",
    ),
    _BUG_REPORT: (
        "NVIDIA's own report, as it is: look into it before you send it",
        """command -v nvidia-bug-report.sh >/dev/null && d=$(mktemp -d) && cd "$d" && {
        nvidia-bug-report.sh --output-file "$d/report" >/dev/null 2>&1; cat "$d"/report*.gz; rm -rf "$d"; }""",
    ),
}  # fmt: skip
"""Each file with its meaning and the command that prints it. No command needs root, and none changes the node."""


def write_rma_folder(
    folder: Path,
    spec: ClusterSpec,
    host: HostSpec,
    history: MachineHistory,
    findings: list[Finding],
    progress: Terminal | None,
) -> None:
    """Collect the evidence of a node, and write it into a new folder without secrets and addresses.

    Raises:
        NodeError: The node cannot be reached.
        RefusedError: The folder exists, or cannot be written.
    """
    try:
        folder.mkdir(mode=0o700)
        results = _collect(spec, host, progress)
        files = {name: result.stdout for name, result in results.items() if result.stdout.strip()}
        files = {name: text if name == _BUG_REPORT else redact_bytes(text) for name, text in files.items()}
        adverse = [finding.to_json() for finding in findings if finding.status in (Status.FAIL, Status.WARN)]
        # Verdicts quote the output of programs, which is none of the vendor's business.
        own = [
            record
            for record in histories_to_json([history])[0]["records"]
            if record["kind"] != RecordKind.VERDICT.value
        ]
        files["findings.json"] = redact_bytes(json.dumps(adverse, indent=1).encode())
        files["history.json"] = redact_bytes(json.dumps(own, indent=1).encode())
        files["README.md"] = _describe(history, files, results).encode()
        for name, content in files.items():
            (folder / name).write_bytes(content)
    except OSError as error:
        raise RefusedError(f"{folder} cannot be written: {error.strerror or error}") from error


def _collect(spec: ClusterSpec, host: HostSpec, progress: Terminal | None) -> dict[str, CommandResult]:
    results: dict[str, CommandResult] = {}
    with (
        open_all_sessions(spec, [host], progress=progress) as sessions,
        WaitingLine(sessions, 0.0, progress, stage="collecting") as waiting,
    ):
        for name, (_, script) in _FILES.items():
            with RemoteCommand({"argv": ["sh", "-c", script]}, _TIMEOUT_S, 1, None) as remote:
                remote.start_on(sessions[host.name])
                answers, errors = remote.wait_for_results(sessions, waiting)
                if errors:
                    raise errors[host.name]
                results[name] = answers[host.name]
    return results


def _describe(history: MachineHistory, files: Mapping[str, bytes], results: Mapping[str, CommandResult]) -> str:
    machine = history.machine
    meanings = {name: meaning for name, (meaning, _) in _FILES.items()} | {
        "findings.json": "the problems that the checks of clusterctl find now, each with the observed value",
        "history.json": "what happened to this machine before: lost nodes, failures and findings with their times",
    }
    cards = [
        f"- GPU {gpu}: {model or 'unknown model'}, {card or 'no serial number'}"
        for gpu, (card, model) in sorted(machine.cards.items())
    ]
    lines = [
        f"# {machine.node}",
        "",
        f"Collected on {time.strftime('%Y-%m-%d %H:%M %Z')} by clusterctl; secrets, addresses and homes are replaced.",
        *([f"\nThe machine {history.offence}."] if history.offence else []),
        "",
        "## Machine",
        "",
        f"- machine id: {machine.identity or 'unknown'}",
        f"- SSH host key: {machine.host_key or 'unknown'}",
        *cards,
        "",
        "## Files",
        "",
        *(f"- `{name}`: {meanings[name]}" for name in files),
        *(f"- missing: `{name}` ({_explain_missing(name, results[name])})" for name in results if name not in files),
    ]
    return "\n".join([*lines, ""])


def _explain_missing(name: str, result: CommandResult) -> str:
    if result.error:
        return result.error
    return (
        "it needs root: run `sudo nvidia-bug-report.sh` on the node"
        if name == _BUG_REPORT
        else "the node has no such program, or it needs root"
    )
