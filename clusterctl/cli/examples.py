"""What to type, for the `--help` of each command; every line of it is run by a test, as those of the pages are."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

EXAMPLES: Mapping[str, Sequence[str]] = {
    "up": ("clusterctl up", "clusterctl up -- --epochs 3", "clusterctl up --exclude NODE"),
    "down": ("clusterctl down", "clusterctl down RUN"),
    "ps": ("clusterctl ps -a",),
    "status": ("clusterctl status",),
    "logs": ("clusterctl logs -f --all", "clusterctl logs RUN --rank 2 -n 200"),
    "attach": ("clusterctl attach", "clusterctl attach --adopt"),
    "wait": ("clusterctl wait --timeout 2h",),
    "health": ("clusterctl health cluster.yaml", "clusterctl health --record health.json"),
    "why": ("clusterctl why",),
    "diff": ("clusterctl diff RUN1 RUN2",),
    "report": ("clusterctl report RUN -o run.html",),
    "stacks": ("clusterctl stacks",),
    "stats": ("clusterctl stats",),
    "top": ("clusterctl top",),
    "exec": (
        "clusterctl exec cluster.yaml -- nvidia-smi -L",
        "clusterctl exec --diff -- pip freeze",
        "clusterctl exec -w NODES -- hostname",
        "clusterctl exec --in-job -- python -c 'import torch'",
    ),
    "shell": ("clusterctl shell NODE", "clusterctl shell --rank 3", "clusterctl shell NODE -- htop"),
    "port-forward": ("clusterctl port-forward 6006", "clusterctl port-forward 8080:80 --node NODE"),
    "cp": (
        "clusterctl cp data.bin all:data/",
        "clusterctl cp NODE:out/log.txt .",
        "clusterctl cp 'all:out/*.txt' results/",
    ),
    "sync": ("clusterctl sync", "clusterctl sync --dry-run", "clusterctl sync --pull 'ckpt/**'"),
    "config": ("clusterctl config --ranks", "clusterctl config --env 5"),
    "init": (
        "clusterctl init gpu[01-08] --gpus 8 --script train.py",
        "clusterctl init gpu[01-08] --template keras_ddp",
        "clusterctl init --template keras_ddp DIR",
        "clusterctl init --from hosts",
    ),
    "export": ("clusterctl export slurm cluster.yaml",),
    "templates": ("clusterctl templates",),
    "trust": ("clusterctl trust", "clusterctl trust --login"),
    "clean": ("clusterctl clean",),
    "schema": ("clusterctl schema -o cluster.schema.json",),
    "completion": ('eval "$(clusterctl completion bash)"',),
    "version": ("clusterctl version --check",),
}
"""Command to lines."""
