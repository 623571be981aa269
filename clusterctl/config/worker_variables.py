"""Environment variables that clusterctl and other launchers set to tell workers their rank and network. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

# torchrun sets these variables (torch 2.13, local_elastic_agent.py), except NODE_RANK, which Composer sets.
RESERVED_NAMES = frozenset(
    {
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK"),
        *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    }
)
_RESERVED_PREFIXES = ("TORCHELASTIC_", "PET_", "CLUSTERCTL_")
RESERVED_NAME_HINTS = {
    "MASTER_PORT": "set `network.master_port`",
    "MASTER_ADDR": "set `hosts[].internal_ip` of the first host",
    "WORLD_SIZE": "set `hosts[].workers`",
    "LOCAL_WORLD_SIZE": "set `hosts[].workers`",
    "TORCHELASTIC_MAX_RESTARTS": "set `restart.max_restarts`",
}
"""How to change the value of a reserved variable by a key of the cluster file."""


class ForeignLauncher(NamedTuple):
    """Another launcher or scheduler.

    Attributes:
        name: The usual name of the launcher.
        variable_prefixes: First characters of the names of its variables.
        job_variables: Variables that only a job of the launcher has; if empty, any variable with a prefix shows a job.
    """

    name: str
    variable_prefixes: tuple[str, ...]
    job_variables: tuple[str, ...] = ()


_LAUNCHERS = (
    ForeignLauncher("Slurm", ("SLURM_", "SLURMD_"), ("SLURM_JOB_ID", "SLURM_JOBID")),
    ForeignLauncher(
        "MPI", ("OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "PMI_", "PMIX_", "MPI_LOCAL", "MV2_COMM_WORLD_", "PALS_")
    ),
    ForeignLauncher("PBS", ("PBS_",), ("PBS_JOBID",)),
    ForeignLauncher("LSF", ("LSB_", "JSM_NAMESPACE_"), ("LSB_JOBID",)),
    ForeignLauncher("Flux", ("FLUX_TASK_", "FLUX_JOB_")),
    ForeignLauncher("Kubernetes", ("KUBERNETES_", "LWS_", "JOB_COMPLETION_INDEX", "VC_TASK_INDEX", "VK_TASK_INDEX")),
    ForeignLauncher("Kubeflow", ("PET_",)),
    ForeignLauncher("SkyPilot", ("SKYPILOT_",)),
    ForeignLauncher("dstack", ("DSTACK_",)),
)
_SUBSTITUTES = {
    "RANK": "SLURM_PROCID OMPI_COMM_WORLD_RANK PMI_RANK PMIX_RANK MV2_COMM_WORLD_RANK PALS_RANKID JSM_NAMESPACE_RANK"
    " FLUX_TASK_RANK",
    "LOCAL_RANK": "SLURM_LOCALID OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_NODE_RANK PMI_LOCAL_RANK MPI_LOCALRANKID"
    " MV2_COMM_WORLD_LOCAL_RANK PALS_LOCAL_RANKID JSM_NAMESPACE_LOCAL_RANK FLUX_TASK_LOCAL_ID",
    "WORLD_SIZE": "SLURM_NTASKS SLURM_NPROCS OMPI_COMM_WORLD_SIZE OMPI_UNIVERSE_SIZE PMI_SIZE MV2_COMM_WORLD_SIZE"
    " JSM_NAMESPACE_SIZE FLUX_JOB_SIZE DSTACK_GPUS_NUM",
    "LOCAL_WORLD_SIZE": "SLURM_NTASKS_PER_NODE SLURM_TASKS_PER_NODE SLURM_GPUS_ON_NODE SLURM_GPUS_PER_NODE"
    " OMPI_COMM_WORLD_LOCAL_SIZE PMI_LOCAL_SIZE MPI_LOCALNRANKS MV2_COMM_WORLD_LOCAL_SIZE PALS_LOCAL_SIZE"
    " JSM_NAMESPACE_LOCAL_SIZE PET_NPROC_PER_NODE SKYPILOT_NUM_GPUS_PER_NODE DSTACK_GPUS_PER_NODE",
    "GROUP_RANK": "SLURM_NODEID PBS_NODENUM LWS_WORKER_INDEX JOB_COMPLETION_INDEX VC_TASK_INDEX VK_TASK_INDEX"
    " PET_NODE_RANK SKYPILOT_NODE_RANK DSTACK_NODE_RANK",
    "GROUP_WORLD_SIZE": "SLURM_NNODES SLURM_JOB_NUM_NODES PBS_NUM_NODES FLUX_JOB_NNODES LWS_GROUP_SIZE PET_NNODES"
    " SKYPILOT_NUM_NODES DSTACK_NODES_NUM",
    "MASTER_ADDR": "SLURM_LAUNCH_NODE_IPADDR SLURM_JOB_NODELIST SLURM_NODELIST PBS_NODEFILE LSB_HOSTS LSB_MCPU_HOSTS"
    " LSB_DJOB_HOSTFILE LWS_LEADER_ADDRESS PET_MASTER_ADDR PET_RDZV_ENDPOINT SKYPILOT_NODE_IPS DSTACK_MASTER_NODE_IP"
    " DSTACK_NODES_IPS",
    "MASTER_PORT": "PET_MASTER_PORT",
    "CLUSTERCTL_RUN_ID": "SLURM_JOB_ID SLURM_JOBID PBS_JOBID LSB_JOBID FLUX_JOB_ID SKYPILOT_TASK_ID DSTACK_RUN_NAME",
    "CLUSTERCTL_ATTEMPT": "SLURM_RESTART_COUNT",
    "CLUSTERCTL_NODE": "SLURMD_NODENAME",
}
"""For each variable of clusterctl, the variables of other launchers that it can replace in a script."""
_BY_FOREIGN_NAME = {foreign: own for own, names in _SUBSTITUTES.items() for foreign in names.split()}

# These variables determine the sources of code, libraries, models and data, the targets of results, and the devices.
# Variables that only tune performance are left out, because a shell has many of them.
_JOB_RELATED_VARIABLES = frozenset(
    {
        *("PYTHONPATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
        *("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_ENDPOINT", "HF_HUB_OFFLINE", "TRANSFORMERS_CACHE"),
        *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "TORCH_HOME", "TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR", "KERAS_HOME"),
        *("WANDB_API_KEY", "WANDB_PROJECT", "WANDB_ENTITY", "WANDB_MODE", "WANDB_DIR", "WANDB_BASE_URL", "WANDB_NAME"),
        *("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "COMET_API_KEY", "NEPTUNE_API_TOKEN", "CLEARML_API_HOST"),
        *("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_IB_HCA"),
        *("NCCL_P2P_DISABLE", "NCCL_DEBUG", "GLOO_SOCKET_IFNAME"),
    }
)


def list_job_related_variables(environ: Mapping[str, str]) -> list[str]:
    """Return the variables of a shell that affect what a job reads and writes, and which devices it uses."""
    return sorted(name for name in _JOB_RELATED_VARIABLES if environ.get(name))


def is_reserved_variable(name: str) -> bool:
    """Return whether clusterctl sets a variable itself, so that the cluster file must not set it."""
    return name in RESERVED_NAMES or name.startswith(_RESERVED_PREFIXES)


def find_launcher_of_variable(name: str) -> ForeignLauncher | None:
    """Return the launcher that sets a variable, or `None` for any other variable."""
    return next((launcher for launcher in _LAUNCHERS if name.startswith(launcher.variable_prefixes)), None)


def is_inside_launcher_job(launcher: ForeignLauncher, variable_names: Collection[str]) -> bool:
    """Return whether a process with these variables belongs to a job of a launcher."""
    if launcher.job_variables:
        return any(name in variable_names for name in launcher.job_variables)
    return any(name.startswith(launcher.variable_prefixes) for name in variable_names)


def find_clusterctl_equivalent(name: str) -> str | None:
    """Return the variable of clusterctl to use in place of a variable of another launcher, or `None`."""
    return _BY_FOREIGN_NAME.get(name)


VIRTUAL_INTERFACE_PREFIXES = ("docker", "br-", "veth", "virbr", "cni", "flannel", "cali", "tunl", "kube", "vnet")
"""Name prefixes of network interfaces of containers and virtual machines, which do not connect nodes."""


def select_interfaces(variable: str, value: str, interfaces: Sequence[str]) -> list[str]:
    """Return the interfaces of a node that a variable such as NCCL_SOCKET_IFNAME selects.

    The result has the order of the value, or with `^` the order of the node.

    NCCL accepts prefixes, `=` with exact names, or `^` with names to exclude; other libraries accept exact names.
    """
    wanted = [word.partition(":")[0].strip() for word in value.lstrip("^=").split(",")]
    is_whole = not variable.startswith("NCCL") or value.lstrip("^").startswith("=")
    found = {
        want: [name for name in interfaces if (name == want if is_whole else name.startswith(want))] for want in wanted
    }
    if variable.startswith("NCCL") and value.startswith("^"):
        unwanted = {name for some in found.values() for name in some}
        return [
            name
            for name in interfaces
            if name not in unwanted and not name.startswith(("lo", *VIRTUAL_INTERFACE_PREFIXES))
        ]
    return list(dict.fromkeys(name for some in found.values() for name in some))
