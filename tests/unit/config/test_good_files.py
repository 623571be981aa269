"""Every short form means what its long form means, resolves, is stored, and satisfies the schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from clusterctl.config.field_types import StallAction
from clusterctl.config.resolved_file import build_resolved_document, render_yaml
from clusterctl.config.schema import build_schema, render_schema
from clusterctl.config.spec import ClusterSpec, Framework, HostSpec, Role, TransportKind, dump_spec, load_spec
from clusterctl.config.text.tree import Document, Problems
from clusterctl.config.text.yaml_parser import parse_yaml_document as read_tree

if TYPE_CHECKING:
    from collections.abc import Callable

    from clusterctl.config.loader import LoadedClusterFile

REPOSITORY = Path(__file__).parents[3]
H = "version: 1\nhosts: gpu01\n"


def hosts(spec: ClusterSpec) -> list[tuple[str, Any]]:
    return [(host.name, host.gpus) for host in spec.hosts]


GOOD: list[Any] = [
    pytest.param(
        "version: 1\nhosts:\n  gpu[01-02]: 8\n  gpu03: 4\njob:\n  script: train.py\n",
        lambda s: (hosts(s), s.job.script) == ([("gpu01", 8), ("gpu02", 8), ("gpu03", 4)], "train.py"),
        id="the_readme_file",
    ),
    pytest.param(
        "version: 1\nhosts: gpu[09-10],gpu05\n",
        lambda s: [h.name for h in s.hosts] == ["gpu09", "gpu10", "gpu05"],
        id="hosts_as_text",
    ),
    pytest.param(
        'version: 1\nhosts: ["gpu[1-2]", n]\n',
        lambda s: hosts(s) == [("gpu1", None), ("gpu2", None), ("n", None)],
        id="hosts_as_flow_list",
    ),
    pytest.param(
        "version: 1\nhosts:\n- rack[1-2]-n[0-1]\n- x\n",
        lambda s: [h.name for h in s.hosts][1:4] == ["rack1-n1", "rack2-n0", "rack2-n1"],
        id="hosts_as_block_list",
    ),
    pytest.param(
        "version: 1\nhosts:\n  - {host: a, gpus: 4, port: 2222}\n  - b\n",
        lambda s: (s.hosts[0].port, s.hosts[1].port) == (2222, None),
        id="objects_and_text_mixed",
    ),
    pytest.param(
        "version: 1\nhosts:\n  a: {gpus: [0, 2], user: root}\n",
        lambda s: s.hosts[0].gpus == (0, 2) and s.hosts[0].user == "root",
        id="object_below_a_host",
    ),
    pytest.param(
        "version: 1\nhosts: {a: [1, 3], b: auto, c: 0, d: }\n",
        lambda s: hosts(s) == [("a", (1, 3)), ("b", None), ("c", 0), ("d", None)],
        id="every_form_of_gpus",
    ),
    pytest.param(
        "version: 1\nhosts: {1: 8, 007: 4, no: 2}\n",
        lambda s: hosts(s) == [("1", 8), ("007", 4), ("no", 2)],
        id="host_names_that_look_like_values",
    ),
    pytest.param(
        "version: 1\nhosts: gpu[1-4]\njob: {command: a, nodes: 2..3}\n",
        lambda s: (s.job.nodes, s.min_nodes) == ((2, 3), 2),
        id="some_of_the_hosts",
    ),
    pytest.param("version: 1\nhosts: ::1\n", lambda s: s.hosts[0].host == "::1", id="ipv6_loopback"),
    pytest.param("version: 1\nhosts: {fd00::12: 8}\n", lambda s: s.hosts[0].host == "fd00::12", id="ipv6_key"),
    pytest.param(
        "version: 1\nhosts:\n- {host: a, address: fd00::12, internal_ip: fd00::13, proxy_jump: fd00::1}\n",
        lambda s: (
            (s.hosts[0].address, s.hosts[0].internal_ip, s.hosts[0].proxy_jump) == ("fd00::12", "fd00::13", "fd00::1")
        ),
        id="ipv6_addresses",
    ),
    pytest.param(
        "version: 1\nhosts: a\nssh: {known_hosts: [~/.ssh/known_hosts, keys/known, /etc/known]}\n",
        lambda s: s.ssh.known_hosts == ("/home/me/.ssh/known_hosts", "/home/me/llm/keys/known", "/etc/known"),
        id="known_hosts_begin_where_the_file_lies",
    ),
    *(
        pytest.param(
            f"version: 1\nhosts: {{a: {{identity_file: {written}}}}}\ndefaults: {{identity_file: keys/other}}\n",
            lambda s, meant=meant: s.hosts[0].identity_file == meant,
            id=f"identity_file_{number}",
        )
        for number, (written, meant) in enumerate(
            {
                "keys/id": "/home/me/llm/keys/id",
                "../id": "/home/me/id",
                "none": "none",
                # What ssh itself expands stays as it is.
                "~/.ssh/id": "~/.ssh/id",
                '"%d/.ssh/id"': "%d/.ssh/id",
                "keys/my id": "/home/me/llm/keys/my id",
            }.items()
        )
    ),
    pytest.param("version: 1\nhosts: fe80::1\n", lambda s: s.hosts[0].host == "fe80::1", id="ipv6_host"),
    pytest.param(
        "version: 1\nhosts: {a: {address: fe80::1%eth0, internal_ip: fd00::2, proxy_jump: 'bob@[fe80::3%ib0]:22,b'}}\n",
        lambda s: (
            (s.hosts[0].address, s.hosts[0].internal_ip, s.hosts[0].proxy_jump)
            == ("fe80::1%eth0", "fd00::2", "bob@[fe80::3%ib0]:22,b")
        ),
        id="ipv6_addresses_with_a_scope",
    ),
    pytest.param(
        "version: 1\nhosts: {a: {user: '${env:USER}'}, b: {user: '${env:LOGNAME:-bob}'}, c: {user: 'CORP\\alice.b'}}\n",
        lambda s: [h.user for h in s.hosts] == ["me", "bob", "CORP\\alice.b"],
        id="user_of_this_machine",
    ),
    pytest.param(
        "version: 1\ndefaults: {user: ubuntu, gpus: 8, env: {A: 1, B: 2}}\nhosts:\n  a:\n  b: {gpus: auto, env: {B: 3}}\n",
        lambda s: (
            [(h.user, h.gpus, h.env) for h in s.hosts]
            == [("ubuntu", 8, {"A": "1", "B": "2"}), ("ubuntu", None, {"A": "1", "B": "3"})]
        ),
        id="defaults_below_hosts",
    ),
    pytest.param(
        "version: 1\nhosts:\n  - {host: localhost, transport: local, workers: 2}\n  - {host: localhost, transport: local, workers: 2}\n",
        lambda s: [(h.name, h.host) for h in s.hosts] == [("localhost.0", "localhost"), ("localhost.1", "localhost")],
        id="a_local_host_twice",
    ),
    pytest.param(
        "version: 1\ndefaults: {transport: {command: [docker, exec, -i, '{host}', /bin/sh]}}\nhosts: a,b\n",
        lambda s: {h.transport for h in s.hosts} == {("docker", "exec", "-i", "{host}", "/bin/sh")},
        id="hosts_behind_a_command",
    ),
    pytest.param(
        "version: 1\ndefaults: {transport: local}\nhosts: a,a,b\n",
        lambda s: [h.name for h in s.hosts] == ["a.0", "a.1", "b"] and s.hosts[0].transport is TransportKind.LOCAL,
        id="local_hosts_in_one_text",
    ),
    pytest.param(
        'version: 1\nhosts:\n  gpu[1-2]: {address: "10.0.0.[5-6]", internal_ip: "10.1.0.[5-6]"}\n',
        lambda s: [(h.address, h.internal_ip) for h in s.hosts] == [("10.0.0.5", "10.1.0.5"), ("10.0.0.6", "10.1.0.6")],
        id="a_range_of_addresses",
    ),
    pytest.param(
        "version: 1\nhosts:\n  - {host: a, address: h, port: 2201}\n  - {host: b, address: h, port: 2202}\n",
        lambda s: [h.port for h in s.hosts] == [2201, 2202],
        id="containers_behind_ports_of_one_address",
    ),
    pytest.param(
        "version: 1\nhosts: {a: 8, s: {role: spare}}\n",
        lambda s: [h.name for h in s.spare_hosts] == ["s"] and s.hosts[1].role is Role.SPARE,
        id="a_spare",
    ),
    pytest.param(
        H + "job: {module: llm.train, args: [--lr, 1e-3, 0123, no, 22:00, true]}\n",
        lambda s: s.job.args == ("--lr", "1e-3", "0123", "no", "22:00", "true"),
        id="arguments_as_written",
    ),
    pytest.param(H + "job: {command: 'echo $RANK'}\n", lambda s: s.job.command == "echo $RANK", id="command_for_bash"),
    pytest.param(
        H + "job: {command: [./train, -n, 3]}\n",
        lambda s: s.job.command == ("./train", "-n", "3"),
        id="command_as_argv",
    ),
    pytest.param(
        H
        + "job:\n  script: train.py\n  prologue: |\n    module load cuda\n    ulimit -c 0\n  framework: keras\n  inject: false\n  grace: 0\n  finish_grace: 90\n  max_duration: 1h30m\n  checkpoint: {pattern: 'c/*', shared: true}\n",
        lambda s: (
            (
                s.job.prologue,
                s.job.framework,
                s.job.grace,
                s.job.finish_grace,
                s.job.max_duration,
                s.job.checkpoint.shared,
            )
            == ("module load cuda\nulimit -c 0\n", Framework.KERAS, 0.0, 90.0, 5400.0, True)
        ),
        id="every_key_of_job",
    ),
    pytest.param(
        H + "job: {script: gone.py}\nsync: none\n",
        lambda s: s.sync is None and s.job.script == "gone.py",
        id="no_sync_and_a_script_on_the_nodes",
    ),
    pytest.param(
        H + "sync: {source: src, exclude: data/, max_size: 10GB}\njob: {script: run.py}\n",
        lambda s: (s.sync.source, s.sync.exclude, s.sync.max_size) == ("/home/me/llm/src", ("data/",), 10**10),
        id="sync_of_a_subfolder",
    ),
    pytest.param(
        H + "results: best*\n",
        lambda s: (s.results.patterns, s.results.to, s.results.when) == (("best*",), "/home/me/llm/results", "success"),
        id="results_of_one_pattern",
    ),
    pytest.param(
        H + "results: {patterns: [a, b/**], to: ../kept, when: always}\n",
        lambda s: (s.results.patterns, s.results.to, s.results.when) == (("a", "b/**"), "/home/me/kept", "always"),
        id="results_with_all_keys",
    ),
    pytest.param(
        H + "env: {A: yes, B: 1e3, C: 0x10, D: 0123, E: '', F: True}\n",
        lambda s: s.env == {"A": "yes", "B": "1e3", "C": "0x10", "D": "0123", "E": "", "F": "True"},
        id="environment_as_written",
    ),
    pytest.param(
        H + "env_file: .env\nenv: {A: 2}\n",
        lambda s: s.env == {"A": "2", "B": "x y", "C": "a b"},
        id="env_wins_over_env_file",
    ),
    pytest.param(
        "version: 1\nhosts: gpu[01-02]\njob:\n  roles:\n    a: {module: m, args: [--lr, 1e-3], needs: b}\n"
        "    b: {command: x, hosts: gpu01, env: {A: yes}, ready: {port: 8000, http: /, within: 2m}}\n",
        lambda s: (
            (s.job.roles["a"].args, s.job.roles["a"].needs, s.job.roles["b"].env, s.job.roles["b"].ready.within)
            == (("--lr", "1e-3"), ("b",), {"A": "yes"}, 120.0)
        ),
        id="roles",
    ),
    pytest.param(
        H + "secrets: {T: {file: ~/.token}, H: {env: HOME}}\n",
        lambda s: s.secrets == {"T": "s3cret", "H": "/home/me"},
        id="secrets",
    ),
    pytest.param(
        H + "restart: {max_restarts: 3, on: crash, backoff: 0, window: 6h, never_codes: [2, 78]}\n",
        lambda s: (
            (s.restart.on, s.restart.backoff, s.restart.window, s.restart.never_codes)
            == (("crash",), 0.0, 21600.0, (2, 78))
        ),
        id="restart",
    ),
    pytest.param(
        H + "restart: {backoff: 10m}\n", lambda s: s.restart.backoff_max == 600.0, id="backoff_above_its_usual_ceiling"
    ),
    pytest.param(
        H + "restart: {max_restarts: 1}\non_controller_loss: {stop_after: 20s}\n",
        lambda s: s.stop_after_controller_loss == 20.0,
        id="controller_loss_stops",
    ),
    pytest.param(
        H + "on_controller_loss: keep\n", lambda s: s.stop_after_controller_loss is None, id="controller_loss_keeps"
    ),
    pytest.param(
        H + "stall: {timeout: auto, startup_timeout: 40m, action: stop, watch: 'ckpt/**'}\n",
        lambda s: (
            (s.stall.timeout, s.stall.startup_timeout, s.stall.action, s.stall.watch)
            == (None, 2400.0, StallAction.STOP, ("ckpt/**",))
        ),
        id="stall",
    ),
    pytest.param(
        H + "health: {expect: {gpus: 8}, ignore: [a], severity: {b: warn}, required: c, thresholds: {d: 1}}\n",
        lambda s: (s.health.expect, s.health.required, s.health.thresholds) == ({"gpus": 8}, ("c",), {"d": 1.0}),
        id="health",
    ),
    pytest.param(
        H + "logs: {max_size: none, reserve: 0}\n", lambda s: (s.logs.max_size, s.logs.reserve) == (None, 0), id="logs"
    ),
    pytest.param(
        H
        + "ssh: {client: openssh, host_keys: accept-new, known_hosts: ~/kh, connect_timeout: 1.5, parallel: 8}\nnetwork: {interface: eth1, master_port: 29500, node_lost_after: 1m}\n",
        lambda s: (
            (s.ssh.known_hosts, s.ssh.connect_timeout, s.network.master_port, s.network.node_lost_after)
            == (("/home/me/kh",), 1.5, 29500, 60.0)
        ),
        id="ssh_and_network",
    ),
    pytest.param("\ufeff" + H.replace("\n", "\r\n"), lambda s: s.name == "llm", id="byte_order_mark_and_dos_line_ends"),
    pytest.param(
        "x-big: &big {gpus: 8, user: u}\nversion: 1\nhosts:\n  a: {<<: *big, gpus: 4}\n  b: *big\n",
        lambda s: [(h.gpus, h.user) for h in s.hosts] == [(4, "u"), (8, "u")],
        id="anchors_and_merge_keys",
    ),
    pytest.param(
        H + "x-a: 1\njob: {script: train.py, x-note: [1], checkpoint: {x-b: 1}}\nenv: {}\n",
        lambda s: s.job.checkpoint.pattern is None,
        id="extension_keys_everywhere",
    ),
    pytest.param(
        H + "job:\nenv:\nssh:\n  connect_timeout:\n",
        lambda s: s.job is None and s.ssh.connect_timeout == 10.0,
        id="keys_without_value",
    ),
    pytest.param(
        H
        + "network:\n  master_port: ${env:PORT}\nname: ${env:N:-llm}-x\nenv: {A: '${env:PORT}$', B: \"${env:NONE:-}\"}\n",
        lambda s: (s.network.master_port, s.name, s.env) == (29501, "llm-x", {"A": "29501$", "B": ""}),
        id="variables",
    ),
]


@pytest.fixture(params=[pytest.param(row.values, id=row.id) for row in GOOD])
def good(
    request: pytest.FixtureRequest, parse_text: Callable[..., LoadedClusterFile]
) -> tuple[str, LoadedClusterFile, Any]:
    text, holds = request.param
    return text, parse_text(text, environ={"PORT": "29501", "USER": "me"}, with_secrets=True), holds


def test_a_good_file_says_what_it_says(good: tuple[str, LoadedClusterFile, Any]) -> None:
    _, loaded, holds = good
    assert holds(loaded.spec)


def test_a_good_file_satisfies_the_schema(good: tuple[str, LoadedClusterFile, Any]) -> None:
    tree = read_tree(Document("cluster.yaml", good[0].removeprefix("\ufeff")), Problems())
    assert tree is not None
    jsonschema.Draft7Validator(build_schema()).validate(tree.to_plain_value())


def test_a_spec_survives_being_stored_without_its_secrets(good: tuple[str, LoadedClusterFile, Any]) -> None:
    spec = good[1].spec
    text = dump_spec(spec)
    again = load_spec(text)
    assert "s3cret" not in text
    assert {**vars_of(again), "secrets": None} == {**vars_of(spec), "secrets": None}
    assert again.secrets == dict.fromkeys(spec.secrets, "")


def vars_of(spec: ClusterSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in ClusterSpec.__slots__}


def test_the_resolved_file_means_the_same(
    good: tuple[str, LoadedClusterFile, Any], parse_text: Callable[..., LoadedClusterFile]
) -> None:
    spec = good[1].spec
    document = build_resolved_document(spec)
    assert "s3cret" not in json.dumps(document)
    document["secrets"] = {}
    again = parse_text(render_yaml(document)).spec
    assert {**vars_of(again), "secrets": None} == {**vars_of(spec), "secrets": None}


def test_every_resolved_value_has_an_origin(good: tuple[str, LoadedClusterFile, Any]) -> None:
    _, loaded, _ = good
    assert loaded.origins["version"].startswith("cluster.yaml:")
    assert all(place == "default" or ":" in place for place in loaded.origins.values())


def test_there_are_twenty_five_good_files_and_more() -> None:
    assert len(GOOD) >= 25


def test_the_committed_schema_is_not_stale() -> None:
    assert (REPOSITORY / "docs" / "cluster.schema.json").read_text() == render_schema()


def test_the_schema_is_draft_7_and_describes_every_field() -> None:
    document = build_schema()
    jsonschema.Draft7Validator.check_schema(document)
    assert "$defs" not in json.dumps(document)
    for part in (document, *document["definitions"].values()):
        for name, field in part["properties"].items():
            assert "examples" in field, name
            target = field.get("anyOf", [{}])[0].get("$ref", "").rsplit("/")[-1]
            assert "description" in field or "description" in document["definitions"][target], name


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(H + "stal: {}\n", id="unknown_section"),
        pytest.param(H + "job: {script: 5}\n", id="number_for_text"),
        pytest.param("version: 1\nhosts: {a: eight}\n", id="gpus_in_words"),
        pytest.param(H + "stall: {action: resart}\n", id="enum"),
        pytest.param(H + "job: {grace: soon}\n", id="duration"),
        pytest.param("hosts: a\n", id="no_version"),
    ],
)
def test_the_schema_refuses_what_the_parser_refuses(text: str) -> None:
    tree = read_tree(Document("cluster.yaml", text), Problems())
    assert tree is not None
    assert not jsonschema.Draft7Validator(build_schema()).is_valid(tree.to_plain_value())


def test_defaults_are_those_of_the_spec(parse_text: Callable[..., LoadedClusterFile]) -> None:
    spec = parse_text(H).spec
    (host,) = spec.hosts
    assert host == HostSpec(name="gpu01", host="gpu01", workdir=host.workdir)
    assert (spec.name, spec.path, spec.sync.source if spec.sync else None) == (
        "llm",
        "/home/me/llm/cluster.yaml",
        "/home/me/llm",
    )
