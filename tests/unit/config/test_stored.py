"""A spec that was stored with a run is read as it was, and text that is no spec is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.config import spec
from clusterctl.config.spec import dump_spec, load_spec


def exact(value: Any) -> str:
    """Return a value so that 1, 1.0 and True differ, and so does the order of keys."""
    return repr(value)


HOSTS = st.builds(
    spec.HostSpec,
    name=st.text(),
    host=st.text(),
    address=st.none() | st.text(),
    port=st.none() | st.integers(),
    gpus=st.none() | st.integers() | st.lists(st.integers()).map(tuple),
    env=st.dictionaries(st.text(), st.text()),
    role=st.sampled_from(spec.Role),
    transport=st.sampled_from(spec.TransportKind) | st.lists(st.text()).map(tuple),
)
JOBS = st.builds(
    spec.JobSpec,
    command=st.none() | st.text() | st.lists(st.text()).map(tuple),
    args=st.lists(st.text()).map(tuple),
    framework=st.sampled_from(spec.Framework),
    grace=st.floats(0, 1e9),
    max_duration=st.none() | st.floats(0, 1e9),
    checkpoint=st.builds(spec.CheckpointSpec, resume=st.sampled_from(spec.ResumePolicy)),
)
SPECS = st.builds(
    spec.ClusterSpec,
    name=st.text(),
    path=st.text(),
    hosts=st.lists(HOSTS, max_size=3).map(tuple),
    job=st.none() | JOBS,
    ssh=st.builds(
        spec.SshSpec, host_keys=st.sampled_from([None, "strict"]), known_hosts=st.lists(st.text()).map(tuple)
    ),
    sync=st.none() | st.builds(spec.SyncSpec, source=st.text(), exclude=st.lists(st.text()).map(tuple)),
    restart=st.builds(spec.RestartSpec, never_codes=st.lists(st.integers()).map(tuple)),
    health=st.builds(spec.HealthSpec, expect=st.dictionaries(st.text(), st.integers() | st.text())),
    on_controller_loss=st.none() | st.builds(spec.ControllerLossSpec, stop_after=st.floats(0, 1e9)),
)


@given(SPECS)
def test_a_spec_is_read_as_it_was_stored(made: spec.ClusterSpec) -> None:
    assert exact(load_spec(dump_spec(made))) == exact(made)


GOOD: dict[str, Any] = {"name": "a", "path": "/a", "hosts": [{"name": "n", "host": "n"}], "job": None}


def test_what_an_earlier_version_did_not_store_has_its_default_and_what_is_unknown_is_passed_over() -> None:
    read = load_spec(json.dumps({**GOOD, "later": 1}))
    assert (read.ssh, read.hosts[0].role) == (spec.SshSpec(), spec.Role.WORKER)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "[" * 100_000,
        json.dumps({**GOOD, "hosts": None}),
        json.dumps({**GOOD, "hosts": [{"name": "n"}]}),
        json.dumps({**GOOD, "name": 7}),
        json.dumps({**GOOD, "job": {"framework": "caffe"}}),
        json.dumps({**GOOD, "ssh": {"host_keys": "maybe"}}),
        json.dumps({key: value for key, value in GOOD.items() if key != "job"}),
    ],
)
def test_a_stored_spec_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="validation error"):
        load_spec(text)
