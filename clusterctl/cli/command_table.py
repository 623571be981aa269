"""Groups of all commands. Each command has a line of help, examples and synonyms.

`--help` and the overview list the commands in the order of this module. The module of a command is imported when the
command runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


class CommandHelp(NamedTuple):
    """The help of a command, which is available without importing the command's module.

    Attributes:
        summary: The line of help.
        examples: Command lines; a test runs each of them.
        synonyms: Other words, separated by blanks, for which clusterctl suggests this command.
    """

    summary: str
    examples: tuple[str, ...]
    synonyms: str = ""


GROUPS: Mapping[str, Mapping[str, CommandHelp]] = {
    "Run": {
        "up": CommandHelp(
            "Start a run: check the nodes, sync the code, start every rank, follow",
            ("clusterctl up", "clusterctl up -- --epochs 3", "clusterctl up --exclude NODE"),
            "run start launch submit train begin go sbatch srun torchrun mpirun resume plan",
        ),
        "down": CommandHelp(
            "Stop a run and verify that no process is left",
            ("clusterctl down", "clusterctl down RUN"),
            "stop kill cancel end abort terminate halt delete scancel shutdown destroy quit",
        ),
        "attach": CommandHelp(
            "Follow a run; `d` or Ctrl-C detaches",
            ("clusterctl attach", "clusterctl attach --adopt"),
            "follow reattach adopt join",
        ),
        "wait": CommandHelp("Wait until a run ends, and exit with its exit code", ("clusterctl wait --timeout 2h",)),
    },
    "Look": {
        "ps": CommandHelp("List runs", ("clusterctl ps -a",), "list ls runs jobs squeue qstat sacct history"),
        "status": CommandHelp(
            "Show the nodes, workers and first failure of a run",
            ("clusterctl status",),
            "info show describe inspect state detail details get",
        ),
        "logs": CommandHelp(
            "Show or follow the output of all ranks",
            ("clusterctl logs -f --all-ranks", "clusterctl logs RUN --rank 2 -n 200"),
            "tail log output cat stdout stderr print",
        ),
        "why": CommandHelp(
            "Explain what went wrong with a run, and which rank caused it",
            ("clusterctl why",),
            "debug explain reason error errors",
        ),
        "plot": CommandHelp(
            "Draw loss, steps and utilisation of a run over time",
            ("clusterctl plot", "clusterctl plot RUN loss,step,util"),
            "chart curve graph loss",
        ),
        "diff": CommandHelp("Compare two runs", ("clusterctl diff RUN1 RUN2",), "compare"),
        "report": CommandHelp(
            "Write a report of a run as one HTML page, or as a trace",
            ("clusterctl report RUN -o run.html", "clusterctl report --trace"),
            "html page timeline",
        ),
        "stacks": CommandHelp(
            "Show the current stacks of all ranks",
            ("clusterctl stacks", "clusterctl stacks --speedscope"),
            "trace traceback py-spy pystack flamegraph",
        ),
        "profile": CommandHelp(
            "Record what ranks do now, as a trace for ui.perfetto.dev",
            ("clusterctl profile --rank 3 --for 5s",),
            "profiler perfetto kineto nsys record",
        ),
        "top": CommandHelp(
            "Show ranks, GPUs and nodes live", ("clusterctl top",), "monitor watch htop nvtop dashboard"
        ),
        "stats": CommandHelp(
            "Show utilisation, memory, temperature and power",
            ("clusterctl stats",),
            "gpus gpu nvidia-smi usage utilisation utilization",
        ),
    },
    "Nodes": {
        "health": CommandHelp(
            "Check GPUs, drivers, disks, clocks and network of all nodes",
            ("clusterctl health cluster.yaml", "clusterctl health --record health.json"),
            "check test verify probe nodes hosts sinfo",
        ),
        "exec": CommandHelp(
            "Run a command on all nodes; equal output is shown once",
            (
                "clusterctl exec cluster.yaml -- nvidia-smi -L",
                "clusterctl exec --diff -- pip freeze",
                "clusterctl exec -w NODES -- hostname",
                "clusterctl exec --in-job -- python -c 'import torch'",
            ),
            "pdsh clush do each parallel",
        ),
        "shell": CommandHelp(
            "Open a terminal on a node, or with the environment of a rank",
            ("clusterctl shell NODE", "clusterctl shell --rank 3", "clusterctl shell NODE -- htop"),
            "ssh login connect bash sh terminal enter console",
        ),
        "port-forward": CommandHelp(
            "Forward ports of this machine to a node",
            ("clusterctl port-forward 6006", "clusterctl port-forward 8080:80 --node NODE"),
            "forward tunnel proxy ports tensorboard jupyter",
        ),
        "cp": CommandHelp(
            "Copy files to nodes or from nodes",
            (
                "clusterctl cp data.bin all:data/",
                "clusterctl cp NODE:out/log.txt .",
                "clusterctl cp 'all:out/*.txt' results/",
            ),
            "copy scp upload download put fetch",
        ),
        "cast": CommandHelp(
            "Copy large files to all nodes at once: the nodes pass them on to one another",
            (
                "clusterctl cast data.bin data/",
                "clusterctl cast NODE:data.bin all:data/",
                "clusterctl cast data.bin data/ --limit 50MB/s",
            ),
            "broadcast distribute torrent yeet bcast sbcast weights",
        ),
        "sync": CommandHelp(
            "Push code to the nodes, or pull results from them",
            ("clusterctl sync", "clusterctl sync --dry-run", "clusterctl sync --pull 'ckpt/**'"),
            "rsync push pull deploy",
        ),
        "trust": CommandHelp(
            "Accept the host keys of the nodes",
            ("clusterctl trust", "clusterctl trust --login"),
            "accept keys known-hosts",
        ),
        "clean": CommandHelp(
            "Remove old runs from this head and from nodes", ("clusterctl clean",), "rm remove prune purge gc cleanup"
        ),
    },
    "Team": {
        "who": CommandHelp(
            "Show which GPUs are free, and who uses the others",
            ("clusterctl who",),
            "free users owner occupied busy gpustat w",
        ),
        "reserve": CommandHelp(
            "Hold GPUs for a person until a time",
            ("clusterctl reserve --for 2h --note TEXT", "clusterctl reserve --release"),
            "book hold claim block salloc lock keep",
        ),
        "serve": CommandHelp(
            "Serve a live page of all runs for browsers",
            ("clusterctl serve",),
            "web browser ui http url",
        ),
        "metrics": CommandHelp(
            "Give metrics of all runs to Prometheus",
            ("clusterctl metrics", "clusterctl metrics --listen 9736", "clusterctl metrics --textfile DIR"),
            "prometheus grafana exporter scrape openmetrics",
        ),
        "notify": CommandHelp(
            "Send a test message to each target of `notify`",
            ("clusterctl notify --test",),
            "slack webhook message alert",
        ),
    },
    "Set-up": {
        "init": CommandHelp(
            "Write a first cluster file, or copy a ready-to-run job",
            (
                "clusterctl init gpu[01-08] --gpus 8 --script train.py",
                "clusterctl init gpu[01-08] --template keras_ddp",
                "clusterctl init --template keras_ddp DIR",
                "clusterctl init --from hosts",
                "clusterctl init --list",
            ),
            "new create setup generate add templates template examples example",
        ),
        "demo": CommandHelp(
            "Train on four nodes of this machine, and break them by keys",
            ("clusterctl demo", "clusterctl demo --keys kq --record demo.cast"),
            "try tour tutorial playground",
        ),
        "config": CommandHelp(
            "Check and print the cluster file",
            (
                "clusterctl config --ranks",
                "clusterctl config --env 5",
                "clusterctl config --schema -o cluster.schema.json",
            ),
            "validate lint env ranks settings view schema",
        ),
        "export": CommandHelp(
            "Convert the cluster file for Slurm or Kubernetes", ("clusterctl export slurm cluster.yaml",)
        ),
        "completion": CommandHelp("Print the completion script of a shell", ('eval "$(clusterctl completion bash)"',)),
        "doctor": CommandHelp("Check whether this machine can start runs", ("clusterctl doctor",)),
        "version": CommandHelp(
            "Show the versions here and on nodes", ("clusterctl version", "clusterctl version cluster.yaml")
        ),
    },
}
COMMANDS: Mapping[str, CommandHelp] = {name: info for group in GROUPS.values() for name, info in group.items()}
ALIASES = {"diagnose": "why"}
"""Alternative names of commands, each with the main name of the command."""
