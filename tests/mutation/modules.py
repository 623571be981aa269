"""The modules that decide, and for each the tests that are to hold it: narrow ones, that take seconds."""

from __future__ import annotations

from typing import Final

_RUN: Final = "tests/unit/run/test_"
_STATE: Final = (
    f"{_RUN}state.py",
    f"{_RUN}state_changes.py",
    f"{_RUN}state_and_policy.py",
    f"{_RUN}faults_decided.py",
    f"{_RUN}restarting.py",
    f"{_RUN}refusals.py",
    f"{_RUN}unsaid.py",
)
_CONFIG: Final = (
    "tests/unit/config/test_wrong_files.py",
    "tests/unit/config/test_marks.py",
    "tests/unit/config/test_good_files.py",
    "tests/unit/config/test_several_mistakes.py",
    "tests/unit/config/test_layers.py",
    "tests/unit/config/test_bounds.py",
)
_HEALTH: Final = "tests/unit/health"
_GPUS: Final = (f"{_HEALTH}/test_gpu_limits.py", _HEALTH)
_LOG: Final = (f"{_HEALTH}/test_recovery.py", f"{_HEALTH}/test_log_events.py", f"{_HEALTH}/test_xid.py", _HEALTH)
_NODE: Final = "tests/agent/test_"
_AGENT: Final = "tests/unit/agent"

TESTS: Final[dict[str, tuple[str, ...]]] = {
    "run/rules/next_action": (*_STATE, f"{_RUN}restarting.py", f"{_RUN}stopping.py"),
    "run/rules/outcome": _STATE,
    "run/rules/goodput": (f"{_RUN}goodput.py",),
    "run/rules/failure_causes": (
        f"{_RUN}blame.py",
        f"{_RUN}state.py",
        f"{_RUN}state_changes.py",
        "tests/unit/render/test_report.py",
        "tests/unit/render/test_status.py",
    ),
    "run/rules/stall_detection": (
        "tests/unit/stall/test_judged.py",
        "tests/unit/stall/test_stall_rule.py",
        "tests/unit/stall/test_observer.py",
    ),
    **dict.fromkeys(
        ("run/rules/state", "run/rules/state_updates"),
        (*_STATE, f"{_RUN}folding.py", f"{_RUN}monitoring.py", "tests/unit/render"),
    ),
    **dict.fromkeys(
        ("plan/launch", "plan/layout", "plan/rendezvous", "plan/environment"),
        (
            f"{_RUN}plan.py",
            f"{_RUN}plan_environment.py",
            f"{_RUN}broken_start.py",
            f"{_RUN}unsaid.py",
            "tests/unit/cli/test_files.py",
        ),
    ),
    "config/value_parsers": ("tests/unit/config/test_units.py", *_CONFIG),
    "config/host_ranges": ("tests/unit/config/test_hosts.py", *_CONFIG),
    "config/sections/spec_builder": _CONFIG,
    "logs/safe_text": ("tests/unit/logs/test_clean.py", "tests/unit/logs", "tests/unit/render"),
    "logs/merge": ("tests/unit/logs",),
    "logs/fold": ("tests/unit/logs", "tests/unit/render/test_log.py"),
    **dict.fromkeys(("health/checks/gpu_thermal", "health/checks/gpu_memory"), _GPUS),
    **dict.fromkeys(("health/checks/xid", "health/checks/gpu_links", "health/checks/gpu_failures"), _LOG),
    "transport/ssh/known_hosts": ("tests/unit/transport/test_known_hosts.py",),
    **dict.fromkeys(
        ("agent/protocol/frames", "agent/protocol/run_files", "agent/protocol/command_messages"),
        (f"{_AGENT}/test_protocol.py", _AGENT, f"{_NODE}session_local.py"),
    ),
    "agent/node_state/fencing": (f"{_AGENT}/test_epochs.py", _AGENT, f"{_NODE}deaths.py"),
    "agent/node_state/journal": (
        f"{_AGENT}/test_fold.py",
        f"{_RUN}unsaid.py",
        f"{_AGENT}/test_journal_lines.py",
        f"{_AGENT}/test_journal.py",
        _AGENT,
        f"{_NODE}deaths.py",
        f"{_NODE}run.py",
        f"{_NODE}full_disk.py",
    ),
    **dict.fromkeys(
        ("agent/supervisor/worker_output_files",),
        (
            f"{_AGENT}/test_outputs.py",
            _AGENT,
            f"{_NODE}output.py",
            f"{_NODE}emptied.py",
            f"{_NODE}full_disk.py",
        ),
    ),
    "agent/supervisor/gpu_claims": (f"{_AGENT}/test_claims.py", _AGENT, f"{_NODE}holding.py"),
    "agent/processes/run_processes": (f"{_AGENT}/test_sweep_words.py", _AGENT, f"{_NODE}sweep.py"),
}
"""Module (below `clusterctl/`, without its ending) to the tests, those first that fail first."""
