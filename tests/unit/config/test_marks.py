"""What is underlined of a wrong file: the whole of what is wrong, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from clusterctl.errors import ConfigError
from tests.unit.config.test_wrong_files import WRONG

if TYPE_CHECKING:
    from collections.abc import Callable

    from clusterctl.config.loader import LoadedClusterFile

LONGER_THAN_A_CHARACTER = {
    "idle_without_gpus": "30m",
    "nodes_backwards": "2..1",
    "nodes_in_words": "all",
    "env_in_job": "env",
    "conda": "conda",
    "idle_too_soon": "59s",
    "script_and_roles": "roles",
    "role_with_nodes_and_hosts": "gpu02",
    "role_sets_the_rank": "RANK",
    "idle_without_samples": "1h",
    "results_outside": "../x",
    "script_behind_a_link": "linked.py",
    "home_as_source": "..",
    "results_at_home": "~/x",
    "colon_forgotten_above": "args",
    "transport_that_is_none": "lokal",
    "command_with_a_variable": "${TOKEN}",
    "duplicate_key": "hosts",
    "python_tag": "!!python/object:os.system x",
    "unknown_tag": "!mine x",
    "undefined_anchor": "*nodes",
    "recursive_anchor": "*a",
    "merge_of_scalar": "<<",
    "second_document": "---",
    "nul_escape": '"\\0"',
    "text_at_top": "gpu01 gpu02",
    "version_misspelt": "vesion",
    "hosts_misspelt": "host",
    "version_as_text": "'1'",
    "hosts_without_value": "hosts",
    "range_backwards": "04-01",
    "range_of_letters": "a-b",
    "range_not_closed": "[1-",
    "range_too_large": "n[1-9999999999]",
    "host_twice_in_list": "gpu01",
    "host_twice_by_range": "gpu02",
    "address_twice": "10.0.0.1",
    "one_address_for_a_range": "10.0.0.1",
    "list_item_in_short_form": "gpu01",
    "host_key_misspelt": "hots",
    "gpus_misspelt": "gpu",
    "host_named_twice": "host",
    "gpus_in_words": "eight",
    "gpus_negative": "-1",
    "user_in_host": "root@gpu01",
    "port_in_host": "gpu01:2222",
    "host_like_an_option": "-oProxyCommand=x",
    "user_like_an_option": "-x",
    "port_out_of_range": "70000",
    "port_quoted": "'22'",
    "role_misspelt": "spar",
    "only_spares": "hosts",
    "section_misspelt": "stal",
    "key_in_wrong_section": "max_restarts",
    "job_key_at_top": "script",
    "top_key_in_job": "env_file",
    "script_missing": "tran.py",
    "script_is_a_folder": "src",
    "script_with_arguments": "train.py --fast",
    "script_outside_of_sync": "../train.py",
    "script_and_module": "module",
    "module_is_a_file": "train.py",
    "job_without_target": "job",
    "job_without_value": "job",
    "job_is_text": "train.py",
    "args_as_text": "--epochs 3",
    "duration_in_words": "10 minutes",
    "duration_like_a_clock": "22:00",
    "duration_infinite": ".inf",
    "boolean_of_yaml_1_1": "yes",
    "nested_key_misspelt": "patern",
    "size_without_unit": "500M",
    "sync_false": "false",
    "sync_source_missing": "nope",
    "launcher_owned": "MASTER_PORT",
    "launcher_owned_prefix": "TORCHELASTIC_RUN_ID",
    "launcher_owned_on_host": "WORLD_SIZE",
    "launcher_owned_secret": "RANK",
    "env_name_with_blank": "A B",
    "env_file_missing": "none.env",
    "env_file_not_utf_8": "latin.env",
    "secret_in_the_file": "hf_123",
    "secret_from_both": "TOKEN",
    "secret_unset": "NOPE",
    "secret_file_missing": "~/.nope",
    "secret_in_env_too": "TOKEN",
    "variable_required": "${env:NOPE:?set the server}",
    "variable_malformed": "${a b}",
    "variable_not_closed": "${",
    "variable_unquoted_in_mapping": "${",
    "enum_misspelt": "resart",
    "list_item_not_allowed": "boom",
    "exit_code_too_large": "300",
    "controller_loss_word": "stop",
    "controller_loss_key": "stop",
    "host_keys_no": "no",
    "severity_unknown": "bad",
    "name_with_blank": "a b",
    "name_is_a_number": "2024",
}
"""Of the files in `test_wrong_files.py`; of all others one character is marked."""


@pytest.mark.parametrize(("text", "name"), [pytest.param(case.values[0], case.id, id=case.id) for case in WRONG])
def test_the_mark_covers_what_is_wrong(
    text: bytes | str, name: str, parse_text: Callable[..., LoadedClusterFile]
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_text(text, require_job="job" in name, with_secrets=True)

    (problem,) = caught.value.problems
    marked = slice(problem.column - 1, problem.column - 1 + problem.length)
    lines = text.splitlines() if isinstance(text, str) else text.decode("utf-8", "replace").splitlines()
    assert problem.source == (lines[problem.line - 1] if lines else "")
    assert problem.length == len(LONGER_THAN_A_CHARACTER.get(name, "."))
    assert (problem.source or "")[marked] == LONGER_THAN_A_CHARACTER.get(name, (problem.source or "")[marked])
