"""The process of the deep check before a run (`deep_start`). Its modules start threads."""

from __future__ import annotations

import json
import sys

from clusterctl.cli.node_health import DEEP_PREFIX, probe_and_judge
from clusterctl.config.spec import load_spec


def main() -> None:
    """Measure the nodes of the spec on stdin, and print the findings about the measurements."""

    def show(text: str) -> None:
        print(text, file=sys.stderr, flush=True)  # noqa: T201

    spec = load_spec(sys.stdin.read())
    report = probe_and_judge(spec, spec.worker_hosts, deep="quick", show=show)
    findings = [finding.to_json() for finding in report.findings if finding.check.startswith(DEEP_PREFIX)]
    print(json.dumps(findings))  # noqa: T201


if __name__ == "__main__":
    main()
