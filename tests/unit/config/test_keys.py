"""What is declared of each key holds wherever it is told: in the page, in words, and when it is written and read again."""

from __future__ import annotations

import re
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from clusterctl.config import schema, spec
from clusterctl.config.resolved_file import build_resolved_document, render_yaml
from clusterctl.config.sections.section_declarations import build_section
from clusterctl.config.sections.section_validation import build_validator
from clusterctl.config.spec import dump_spec
from clusterctl.config.value_parsers import format_exact_duration

if TYPE_CHECKING:
    from collections.abc import Callable

    from clusterctl.config.loader import LoadedClusterFile
    from clusterctl.config.sections.section_declarations import SectionField

PAGE = Path(__file__).parents[3] / "docs" / "cluster-file.md"
KEYS = dict(schema.list_keys())


def test_the_tables_of_keys_are_not_stale() -> None:
    assert PAGE.read_text() == schema.fill_key_tables(PAGE.read_text()), "run `make docs`"


def test_each_key_stands_in_one_table() -> None:
    patterns = [one for mark in re.findall(r"<!-- keys: (.*) -->", PAGE.read_text()) for one in mark.split()]
    counts = Counter({path: sum(fnmatchcase(path, one) for one in patterns) for path in KEYS})
    assert set(counts.values()) == {1}, counts


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_a_sentence_that_names_a_default_names_the_one_that_holds(key: SectionField) -> None:
    if "(default)" in key.summary:
        assert key.default_text in key.summary
    word = key.field_type.unparse(None) if key.default is None and key.field_type.unparse is not None else None
    if word is not None and "`" in key.docs.unset_text:
        assert key.docs.unset_text.startswith(f"`{word}`")


def test_the_sentence_about_backoff_names_its_ceiling() -> None:
    assert (
        f"doubles with each restart up to {format_exact_duration(spec.RestartSpec().backoff_max)}"
        in KEYS["restart.backoff"].description
    )


@pytest.mark.parametrize(
    "of",
    [
        spec.SshSpec(),
        spec.NetworkSpec(),
        spec.SyncSpec(source="/src"),
        spec.CheckpointSpec(),
        spec.JobSpec(),
        spec.RestartSpec(),
        spec.StallSpec(),
        spec.HealthSpec(),
        spec.LogsSpec(),
    ],
    ids=lambda of: type(of).__name__,
)
def test_a_section_of_defaults_that_is_written_reads_the_same(of: Any) -> None:
    section = build_section(type(of))
    assert type(of)(**build_validator(section).validate_python(section.format_value(of))) == of


DEFAULTS = """\
version: 1
name: llm
hosts:
- host: gpu01
  gpus: auto
  workers: auto
  workdir: ~/.local/share/clusterctl/work/llm-HASH
  env: {}
  role: worker
  transport: ssh
ssh:
  client: auto
  known_hosts: []
  connect_timeout: 10s
  parallel: 64
network:
  interface: auto
  master_port: auto
  node_lost_after: 2m
sync:
  source: /home/me/llm
  exclude: []
  max_size: 500MiB
env: {}
secrets: {}
job:
  script: train.py
  args: []
  roles: {}
  setup_limit: 30m
  framework: auto
  start_method: spawn
  inject: true
  grace: 10s
  stop_signal: SIGTERM
  finish_grace: 5m
  max_duration: none
  checkpoint:
    shared: false
    resume: this run
restart:
  max_restarts: 0
  'on':
  - crash
  - stall
  - node_lost
  backoff: 10s
  window: none
  never_codes: []
  avoid: none
on_controller_loss: keep
stall:
  timeout: auto
  startup_timeout: 25m
  busy_timeout: auto
  action: report
  watch: []
idle:
  after: none
  action: report
health:
  expect: {}
  ignore: []
  severity: {}
  required: []
  thresholds: {}
logs:
  max_size: none
  reserve: 64MiB
notify:
  'on':
  - start
  - failure
  - stall
  - restart
  - node
  - end
  command: []
  max_per_minute: 10
"""

STORED = (
    '{"name":"llm","path":"/home/me/llm/cluster.yaml","hosts":[{"name":"gpu01","job_role":"","host":"gpu01","address":null,'
    '"internal_ip":null,"user":null,"port":null,"identity_file":null,"proxy_jump":null,"gpus":null,"workers":null,'
    '"python":null,"workdir":"~/.local/share/clusterctl/work/llm-HASH","env":{},"role":"worker","transport":"ssh"}],'
    '"ssh":{"client":"auto","host_keys":null,"known_hosts":[],"connect_timeout":10.0,"parallel":64},'
    '"network":{"interface":null,"master_port":null,"node_lost_after":120.0},'
    '"sync":{"source":"/home/me/llm","exclude":[],"max_size":524288000},"environment":null,"env":{},"secrets":{},'
    '"job":{"script":"train.py","module":null,"command":null,"args":[],"roles":{},"nodes":null,"setup":null,"setup_limit":1800.0,"cache":null,"prologue":null,"framework":"auto",'
    '"start_method":"spawn","preload":null,"inject":true,"grace":10.0,"stop_signal":"SIGTERM","finish_grace":300.0,"max_duration":null,'
    '"checkpoint":{"pattern":null,"shared":false,"resume":"this run"}},'
    '"results":null,"restart":{"max_restarts":0,"on":["crash","stall","node_lost"],"backoff":10.0,"backoff_max":300.0,"window":null,'
    '"never_codes":[],"avoid":"none"},"on_controller_loss":null,"stall":{"timeout":null,"startup_timeout":1500.0,"busy_timeout":null,"action":"report","watch":[]},'
    '"idle":{"after":null,"action":"report"},'
    '"health":{"expect":{},"ignore":[],"severity":{},"required":[],"thresholds":{},"deep":null},'
    '"logs":{"max_size":null,"reserve":67108864},"notify":{"on":["start","failure","stall","restart","node","end"],'
    '"slack":null,"discord":null,"teams":null,"ntfy":null,"webhook":null,"apprise":null,"command":[],'
    '"max_per_minute":10},"min_nodes":null}'
)


def test_a_file_that_says_little_is_printed_and_stored_with_every_default(
    parse_text: Callable[..., LoadedClusterFile],
) -> None:
    said = parse_text("version: 1\nhosts: gpu01\njob: {script: train.py}\n").spec

    assert re.sub("llm-[0-9a-f]{8}", "llm-HASH", render_yaml(build_resolved_document(said))) == DEFAULTS
    assert re.sub("llm-[0-9a-f]{8}", "llm-HASH", dump_spec(said)) == STORED
