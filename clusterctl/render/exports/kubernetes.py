"""A cluster file as an Indexed Job of Kubernetes with a headless service: the same job, without us on the nodes."""

from __future__ import annotations

import json
import math
import re
import shlex
from typing import TYPE_CHECKING

from clusterctl.errors import RefusedError
from clusterctl.plan.launch import STRICT_BASH

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clusterctl.config.spec import ClusterSpec, HostSpec, JobSpec

_PORT = 29500
_MOST_OF_A_NAME = 52
"""A pod's name is the job's, its index and five more characters, and may have 63."""

_SCRIPT = """\
set -u
export WORLD_SIZE={world} LOCAL_WORLD_SIZE={workers} GROUP_WORLD_SIZE={nodes}
export GROUP_RANK=$JOB_COMPLETION_INDEX NODE_RANK=$JOB_COMPLETION_INDEX
pids=
for (( i = 0; i < {workers}; i++ )); do
  (( rank = JOB_COMPLETION_INDEX * {workers} + i ))
  RANK=$rank LOCAL_RANK=$i {command} &
  pids="$pids $!"
done
trap 'kill -TERM $pids 2>/dev/null' TERM
code=0
while [ -n "$pids" ]; do
  left=
  for pid in $pids; do
    if kill -0 $pid 2>/dev/null; then left="$left $pid"; continue; fi
    wait $pid; ended=$?
    if [ $ended -ne 0 ] && [ $code -eq 0 ]; then code=$ended; kill -TERM $pids 2>/dev/null; fi
  done
  pids=$left
  [ -z "$pids" ] || sleep 0.5
done
exit $code"""

_MANIFEST = """\
# Made by `clusterctl export k8s`. Put in an image that has the code, with its folder as `workingDir`.
# All pods end when one fails, and none is started again: a JobSet can restart all of them together.
apiVersion: v1
kind: Service
metadata:
  name: {name}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    job-name: {name}
---
apiVersion: batch/v1
kind: Job
metadata:
  name: {name}
spec:
  completionMode: Indexed
  completions: {nodes}
  parallelism: {nodes}
  backoffLimit: 0{deadline}
  template:
    spec:
      subdomain: {name}
      restartPolicy: Never
      terminationGracePeriodSeconds: {grace}
      containers:
        - name: worker
          image: {image}
          workingDir: {workdir}
          command: ["/bin/bash", "-c", {script}]
          env:
{env}{resources}
          volumeMounts:
            - {{name: shm, mountPath: /dev/shm}}
      volumes:
        - name: shm
          emptyDir: {{medium: Memory}}
"""


def manifest(spec: ClusterSpec, job: JobSpec, *, image: str, workdir: str = "/workspace") -> str:
    """Return a service and a job, as YAML.

    Args:
        spec: The cluster file; its hosts say how many pods with how many GPUs.
        job: Its job.
        image: Of the pods.
        workdir: Where the code lies in the image.

    Raises:
        RefusedError: The hosts are not alike, which the pods of a job have to be; or something is no text.
    """
    name = re.sub(r"[^a-z0-9]+", "-", spec.name.lower()).strip("-")[:_MOST_OF_A_NAME].rstrip("-") or "job"
    gpus, workers = _alike(spec)
    nodes = len(spec.workers)
    script = _SCRIPT.format(world=nodes * workers, workers=workers, nodes=nodes, command=_command(job))
    deadline = f"\n  activeDeadlineSeconds: {math.ceil(job.max_duration)}" if job.max_duration is not None else ""
    limits = f"\n          resources:\n            limits: {{nvidia.com/gpu: {gpus}}}" if gpus else ""
    return _MANIFEST.format(
        name=_quoted(name),
        nodes=nodes,
        deadline=deadline,
        grace=math.ceil(job.grace),
        image=_quoted(image, "`--image`"),
        workdir=_quoted(workdir),
        script=_quoted(_literal(script)),
        env="\n".join(f"            - {line}" for line in _env(spec, name)),
        resources=limits,
    )


def _alike(spec: ClusterSpec) -> tuple[int, int]:
    """Return GPUs and workers of every pod."""
    kinds = {(_gpus(host), host.workers) for host in spec.workers}
    gpus, workers = kinds.pop()
    if kinds:
        raise RefusedError("the pods of a job are alike, and the hosts of the file are not", hint="export a part of it")
    if gpus is None:
        hint = "write `gpus: 8` below `defaults`, or add `--set defaults.gpus=8`"
        raise RefusedError("the file leaves the GPUs open, and a pod has to ask for them", hint=hint)
    return gpus, workers or gpus or 1


def _gpus(host: HostSpec) -> int | None:
    match host.gpus:
        case tuple() as indices:
            return len(indices)
        case count:
            return count


def _command(job: JobSpec) -> str:
    """Return what a shell runs for each worker."""
    args = shlex.join(job.args)
    if job.script is not None:
        text = f"python {shlex.quote(job.script)} {args}"
    elif job.module is not None:
        text = f"python -m {shlex.quote(job.module)} {args}"
    elif isinstance(job.command, tuple):
        text = shlex.join([*job.command, *job.args])
    else:
        text = f'{job.command} "$@"' if job.args else f"{job.command}"
    prologue = f"{job.prologue}\n" if job.prologue else ""
    plain = job.command is None or isinstance(job.command, tuple)
    if plain and not prologue:
        return text.strip()
    rest = "" if plain else f" bash {args}"
    return f"{shlex.join(STRICT_BASH)} {shlex.quote(prologue + text.strip())}{rest}".rstrip()


def _env(spec: ClusterSpec, name: str) -> Iterator[str]:
    port = spec.network.master_port or _PORT
    own = {"MASTER_ADDR": f"{name}-0.{name}", "MASTER_PORT": str(port), "PYTHONUNBUFFERED": "1"}
    # A host's own variables are those of one machine, and pods have no fixed one.
    for key, value in (own | spec.env | {"MASTER_ADDR": own["MASTER_ADDR"]}).items():
        yield f"{{name: {_quoted(key)}, value: {_quoted(_literal(value), f'`env.{key}`')}}}"
    for key in spec.secrets:
        source = f"{{secretKeyRef: {{name: {_quoted(name)}, key: {_quoted(key)}}}}}"
        yield f"{{name: {_quoted(key)}, valueFrom: {source}}}"


def _quoted(text: str, place: str = "`job`") -> str:
    """Return a text in double quotes, in ASCII: YAML does not join the two halves by which JSON writes an emoji.

    Raises:
        RefusedError: It has bytes that are no UTF-8, for which YAML has no sign.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        hint = "Kubernetes takes text alone: leave it out, or encode it"
        raise RefusedError(f"{place} holds bytes that are no UTF-8", hint=hint) from error
    signs = (json.dumps(sign)[1:-1] if ord(sign) < 0x10000 else f"\\U{ord(sign):08x}" for sign in text)
    return f'"{"".join(signs)}"'


def _literal(text: str) -> str:
    """Keep Kubernetes from filling in what is for a shell."""
    return text.replace("$(", "$$(")
