"""Variables of a login that decide over what a rank is given: a node names those that it has at the first contact."""

from __future__ import annotations

OF_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""Which network a rank uses, by library."""

VARIABLES = (
    *OF_INTERFACES,
    *("OMP_NUM_THREADS", "PYTHONUNBUFFERED", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_FR_BUFFER_SIZE"),
    *("CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    *("KERAS_BACKEND", "TF_CONFIG", "JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_PORT"),
    *("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
    *("KERAS_DISTRIBUTION_JOB_ADDRESSES", "KERAS_DISTRIBUTION_NUM_PROCESSES", "KERAS_DISTRIBUTION_PROCESS_ID"),
)

MOST_CHARACTERS = 1024
"""Of a value; a longer one is cut off, which still tells it from ours."""
