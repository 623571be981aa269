"""`clusterctl completion`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from clusterctl.cli.base_command import CliCommand, CommonOptions

_SETUP_LINES = {
    "bash": 'eval "$(clusterctl completion bash)"   # in ~/.bashrc',
    "zsh": 'eval "$(clusterctl completion zsh)"   # in ~/.zshrc, after compinit',
    "fish": "clusterctl completion fish | source   # in ~/.config/fish/config.fish",
}

# Lines that add completion for `cctl`, the short name of the program.
_CCTL_LINES = {
    "bash": "complete -o nosort -F _clusterctl_completion cctl",
    "zsh": "compdef _clusterctl_completion cctl",
    "fish": 'complete --no-files --command cctl --arguments "(_clusterctl_completion)"',
}


@click.command("completion", cls=CliCommand)
@click.argument("shell", type=click.Choice(list(_SETUP_LINES)))
@click.pass_obj
def command(common: CommonOptions, shell: str) -> int:
    """Print the completion script of a shell.

    \b
    eval "$(clusterctl completion bash)"    # in ~/.bashrc
    eval "$(clusterctl completion zsh)"     # in ~/.zshrc, after compinit
    clusterctl completion fish | source     # in ~/.config/fish/config.fish
    """
    console = common.console()
    console.write_stdout_text(_render_script(shell))
    if console.out.live and not common.quiet:
        console.write_stderr("", f"to use it: {_SETUP_LINES[shell]}")
    return 0


def _render_script(shell: str) -> str:
    kind = get_completion_class(shell)
    assert kind is not None, "click knows bash, zsh and fish"
    script = kind(click.get_current_context().find_root().command, {}, "clusterctl", "_CLUSTERCTL_COMPLETE").source()
    # Split only at the first comma, because a value may be a set such as `0,1`, which contains commas.
    script = script.replace('string split ","', 'string split --max 1 ","')
    return f"{script.rstrip()}\n{_CCTL_LINES[shell]}"
