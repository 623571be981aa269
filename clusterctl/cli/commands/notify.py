"""`clusterctl notify`."""

from __future__ import annotations

import os
import time

import click

from clusterctl.cli import cluster_selection, options
from clusterctl.cli.base_command import CliCommand, CommonOptions
from clusterctl.errors import ExitCode, RefusedError
from clusterctl.render.table import Column, render_table
from clusterctl.run.controller.message_delivery import DeliveryError, deliver, list_targets, read_url
from clusterctl.run.rules.notification import Message, MessageEvent


@click.command("notify", cls=CliCommand, reads_file=True)
@options.cluster_file_argument
@click.option("--test", "is_test", is_flag=True, help="Send a test message to each target of `notify`.")
@options.json_option
@click.pass_obj
def command(common: CommonOptions, path: str | None, *, is_test: bool, as_json: bool) -> int:
    """Send a test message to each target of `notify`, and show what each target answered.

    `notify --test` exits with exit code 100 if a target did not take the message. Messages about a run are sent by the
    controller of the run.
    """
    if not is_test:
        raise click.UsageError("`notify` needs `--test`; a run sends its messages itself")
    console = common.console()
    spec = cluster_selection.load_chosen_cluster_file(common, path, with_secrets=True, console=console).spec
    targets = list_targets(spec.notify)
    if not targets:
        hint = "add `notify: {slack: {env: SLACK_URL}}`; docs/notify.md lists all keys"
        raise RefusedError(f"{spec.path} names no target in `notify`", hint=hint)
    answers = []
    message = Message(
        id="test",
        run=spec.name,
        event=MessageEvent.START,
        title=f"{spec.name}: a test message of clusterctl",
        text="messages about runs will arrive here",
        command="clusterctl up",
        time=time.time(),
    )
    for target in targets:
        try:
            url = "" if target == "command" else read_url(spec.notify.addresses[target], os.environ)
            answers.append((target, True, deliver(spec, target, url, message)))
        except DeliveryError as error:
            answers.append((target, False, str(error)))
    if as_json:
        console.write_stdout_json([{"target": name, "ok": is_ok, "answer": text} for name, is_ok, text in answers])
    else:
        glyphs = console.out.glyphs
        rows = [(name, glyphs.ok if is_ok else glyphs.fail, text) for name, is_ok, text in answers]
        columns = (Column(title="TARGET"), Column(title=""), Column(title="ANSWER", shrink=True))
        console.write_stdout(*render_table(columns, rows, console.out))
    return int(ExitCode.OK if all(is_ok for _, is_ok, _ in answers) else ExitCode.FAILED)
