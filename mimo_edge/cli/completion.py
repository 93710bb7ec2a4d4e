"""mimo-edge completion: the script that makes a shell complete this command."""

from __future__ import annotations

import click

from mimo_edge.cli.common import debug_option

INSTALL = """
\b
Install it for every new shell:
  mimo-edge completion bash >> ~/.bashrc
  mimo-edge completion zsh  >> ~/.zshrc
  mimo-edge completion fish > ~/.config/fish/completions/mimo-edge.fish
"""


@click.command(epilog=INSTALL)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@debug_option
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a completion script for a shell."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    root = ctx.find_root()
    script = kind(root.command, {}, "mimo-edge", "_MIMO_EDGE_COMPLETE")
    click.echo(script.source_template % script.source_vars())
