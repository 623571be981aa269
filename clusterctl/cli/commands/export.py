"""`clusterctl export`."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import click

from clusterctl.cli import cluster_selection, options
from clusterctl.cli.base_command import CliCommand, CommonOptions
from clusterctl.cli.option_values import list_cluster_files
from clusterctl.plan.launch import build_container
from clusterctl.plan.layout import choose_nodes
from clusterctl.render import export_kubernetes, export_slurm


@click.command("export", cls=CliCommand, reads_file=True)
@click.argument("kind", metavar="KIND", type=click.Choice(["slurm", "k8s"]))
@options.cluster_file_argument
@options.nodes_option
@options.exclude_option("Leave out these nodes.")
@click.option("--image", metavar="IMAGE", help="Image for the pods (k8s only), by default that of the file.")
@click.pass_obj
def command(
    common: CommonOptions, *, path: str | None, kind: str, image: str | None, nodes: str | None, exclude: str | None
) -> int:
    """Convert the cluster file: KIND `slurm` prints a script for sbatch, and `k8s` prints an Indexed Job.

    The script runs `clusterctl up` on the nodes of the allocation; scancel (exit code 103) and the time limit (106)
    stop the run gracefully. The Job runs the workers in pods with the same variables, without clusterctl. Settings that
    have no equivalent are named on stderr and at the top of the output.
    """
    if image is not None and kind != "k8s":
        raise click.UsageError("`--image` needs `k8s`")
    console = common.console()
    loaded = cluster_selection.load_chosen_cluster_file(common, path, require_job=True, console=console)
    hosts = cluster_selection.select_spec_hosts(loaded.spec, nodes, exclude)
    spec = choose_nodes(replace(loaded.spec, hosts=hosts))
    if spec.job is not None and spec.job.roles:
        raise click.UsageError("a job with roles cannot be exported; `clusterctl up` starts it")
    if not spec.worker_hosts:
        raise click.UsageError("no worker host is left: all chosen hosts are spares")
    notes = (export_kubernetes if kind == "k8s" else export_slurm).list_unsupported_settings(spec, loaded.written_keys)
    if kind == "k8s":
        assert spec.job is not None, "it was required"
        container = build_container(spec)
        image = image or (container["image"] if container else "IMAGE")
        text = export_kubernetes.render_manifest(spec, spec.job, image=image, unsupported=notes)
    else:
        paths = [os.path.abspath(path) for path in list_cluster_files(path, common.files)]
        folder = os.path.dirname(paths[0])
        text = export_slurm.render_batch_script(
            spec, program=_get_program_words(), folder=folder, files=paths, overrides=common.sets, unsupported=notes
        )
    console.write_stderr(*(f"warning: {line}" for line in notes))
    console.write_stdout_text(text)
    return 0


def _get_program_words() -> tuple[str, ...]:
    """Return the command that starts this program from any folder."""
    started = os.path.abspath(sys.argv[0])
    if os.path.basename(started) in ("clusterctl", "cctl") and os.access(started, os.X_OK):
        return (started,)
    return sys.executable, "-m", "clusterctl"
