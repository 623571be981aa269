"""Finds candidates of shell completion (runs, nodes, ranks, files). All candidates come from files of this machine.

Completion raises no errors and prints no messages: an unreadable file gives no candidates.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator

import click
from click.shell_completion import CompletionItem, split_arg_string

from clusterctl.cli.option_values import list_cluster_files
from clusterctl.cli.templates import list_templates
from clusterctl.config.spec import ClusterSpec
from clusterctl.errors import ClusterctlError
from clusterctl.plan import layout
from clusterctl.run.record import state_reader
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.record.state_reader import load_state

_MAX_RUNS = 50
"""Maximum number of runs among the candidates: reading more journals would make completion slow."""


def list_completions(
    candidate_type: str, context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Return the candidates of a type (a key of `_COMPLETERS`) for an incomplete word."""
    if context.meta.get("clusterctl.dashes"):
        return [CompletionItem(incomplete, type="file")]
    with contextlib.suppress(ClusterctlError, OSError, ValueError):
        return _COMPLETERS[candidate_type](_reparse_earlier_words(context, parameter), incomplete)
    return []


def _reparse_earlier_words(context: click.Context, parameter: click.Parameter) -> click.Context:
    """Parse only the words before the last option, because click does not parse an option without a value."""
    if not isinstance(parameter, click.Option):
        return context
    words = split_arg_string(os.environ.get("COMP_WORDS", ""))
    if context.info_name in words:
        words = words[words.index(context.info_name) + 1 :]
    words = words[: words.index("--")] if "--" in words else words
    option = max((i for i, word in enumerate(words) if word.startswith("-")), default=len(words))
    return context.command.make_context(
        context.info_name, words[:option], parent=context.parent, resilient_parsing=True
    )


# --- files


def _complete_files(_: click.Context, incomplete: str) -> list[CompletionItem[str]]:
    return list(_list_yaml_files(incomplete)) or [CompletionItem(incomplete, type="file")]


def _list_yaml_files(incomplete: str) -> Iterator[CompletionItem[str]]:
    folder, begun = os.path.split(incomplete)
    for entry in sorted(os.scandir(os.path.expanduser(folder) or "."), key=lambda entry: entry.name):
        hidden = entry.name.startswith(".") and not begun.startswith(".")
        if entry.name.startswith(begun) and not hidden and entry.name.endswith((".yaml", ".yml")):
            yield CompletionItem(os.path.join(folder, entry.name))


# --- runs


def _complete_runs(context: click.Context, incomplete: str) -> list[CompletionItem[str]]:
    return _list_run_candidates(context, incomplete, active=False) or list(_list_yaml_files(incomplete))


def _complete_active_runs(context: click.Context, incomplete: str) -> list[CompletionItem[str]]:
    return _list_run_candidates(context, incomplete, active=True)


def _list_run_candidates(context: click.Context, incomplete: str, *, active: bool) -> list[CompletionItem[str]]:
    named = context.params.get("references") or ()
    runs = [r for r in reversed(state_reader.list_runs()) if r.run.startswith(incomplete) and r.run not in named]
    items_of_runs = []
    for run in runs[:_MAX_RUNS]:
        state, _ = state_reader.load_state_and_attendance(run, state_reader.load_summary_or_state)
        if state.may_run or not active:
            items_of_runs.append((state.is_over, CompletionItem(run.run, help=state.phase.value)))
    return [item for _, item in sorted(items_of_runs, key=lambda pair: pair[0])]


def _find_named_run(context: click.Context) -> RunDir | None:
    """Return the run that earlier words of the command line name."""
    if not any(parameter.name in ("reference", "references") for parameter in context.command.params):
        return None
    named = context.params.get("reference") or next(iter(context.params.get("references") or ()), None)
    return state_reader.find_run(named)


# --- nodes and ranks


def _load_spec(context: click.Context) -> ClusterSpec:
    """Return the spec of the cluster file that earlier words of the command line name; by default ./cluster.yaml."""
    from clusterctl.config.loader import load_cluster_file

    paths = list_cluster_files(context.params.get("path"), context.obj.files)
    return load_cluster_file(paths, environ=os.environ, sets=context.obj.sets).spec


def _complete_nodes(context: click.Context, incomplete: str) -> list[CompletionItem[str]]:
    run = _find_named_run(context)
    names = list(load_state(run).nodes) if run is not None else [host.name for host in _load_spec(context).hosts]
    return _complete_list(names, incomplete)


def _complete_ranks(context: click.Context, incomplete: str) -> list[CompletionItem[str]]:
    run = _find_named_run(context)
    if run is not None:
        return _complete_list(map(str, sorted(load_state(run).workers)), incomplete)
    entries = layout.assign_ranks_from_file(_load_spec(context)) or ()
    return _complete_list((str(rank) for entry in entries for rank in entry.ranks), incomplete)


def _complete_list(names: Iterable[str], incomplete: str) -> list[CompletionItem[str]]:
    """Complete the last name of a list such as `a,b,c`. Names that the list already contains are no candidates."""
    before, comma, begun = incomplete.rpartition(",")
    taken = before.split(",")
    return [CompletionItem(before + comma + n) for n in names if n.startswith(begun) and n not in taken]


# --- words


def _complete_checks(_: click.Context, incomplete: str) -> list[CompletionItem[str]]:
    from clusterctl.health.registry import CHECKS

    return _complete_list(CHECKS, incomplete)


def _complete_templates(_: click.Context, incomplete: str) -> list[CompletionItem[str]]:
    return [CompletionItem(t.name, help=t.summary) for t in list_templates() if t.name.startswith(incomplete)]


def _complete_keys(_: click.Context, incomplete: str) -> list[CompletionItem[str]]:
    """Return keys for `--set`, each followed by `=`."""
    from clusterctl.config.sections.section_declarations import CLUSTER_FILE, MAPPINGS

    keys = {name: key for name, key in CLUSTER_FILE.keys.items() if name not in MAPPINGS}
    keys |= {f"{name}.{key.name}": key for name, section in MAPPINGS.items() for key in section.keys.values()}
    words = [(f"{name}=", key.description) for name, key in keys.items()]
    return [CompletionItem(word, help=description) for word, description in words if word.startswith(incomplete)]


_COMPLETERS: dict[str, Callable[[click.Context, str], list[CompletionItem[str]]]] = {
    "files": _complete_files,
    "runs": _complete_runs,
    "active": _complete_active_runs,
    "nodes": _complete_nodes,
    "ranks": _complete_ranks,
    "checks": _complete_checks,
    "keys": _complete_keys,
    "templates": _complete_templates,
}
