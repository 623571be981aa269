"""`clusterctl completion`."""

from __future__ import annotations

import click

from clusterctl.cli import options

_WHERE = {
    "bash": 'eval "$(clusterctl completion bash)"   # in ~/.bashrc',
    "zsh": 'eval "$(clusterctl completion zsh)"   # in ~/.zshrc, after compinit',
    "fish": "clusterctl completion fish > ~/.config/fish/completions/clusterctl.fish",
}


@click.command("completion")
@click.argument("shell", type=click.Choice(list(_WHERE)))
@options.output_options
def command(shell: str, color: str, quiet: bool) -> int:
    r"""Print the completion script of a shell.

    \b
    eval "$(clusterctl completion bash)"      in ~/.bashrc
    eval "$(clusterctl completion zsh)"       in ~/.zshrc, after compinit
    clusterctl completion fish > ~/.config/fish/completions/clusterctl.fish
    """
    from click.shell_completion import get_completion_class

    from clusterctl.cli.main import cli

    console = options.console_of(color)
    kind = get_completion_class(shell)
    assert kind is not None, "click knows bash, zsh and fish"
    console.data(kind(cli, {}, "clusterctl", "_CLUSTERCTL_COMPLETE").source().rstrip("\n"))
    if console.out.live and not quiet:
        console.narrate("", f"to use it: {_WHERE[shell]}")
    return 0
