"""What is read without pydantic is what pydantic would have read: sections of cluster files, and specs of runs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from clusterctl.config import spec
from clusterctl.config.sections.certain import certain
from clusterctl.config.sections.declared import CLUSTER_FILE, CONTROLLER_LOSS, HOST, SECRET, SECTIONS, SYNC, Section
from clusterctl.config.sections.models import model_of
from clusterctl.config.stored import dump, load_stored

ALL = [CLUSTER_FILE, CONTROLLER_LOSS, HOST, SECRET, SYNC, *SECTIONS.values()]
NEAR = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 70000),
    st.floats(),
    st.sampled_from([2**53, 2**63, 10**30, -(2**70)]),
    st.sampled_from(["auto", "none", "local", "10s", "1GiB", "crash", "", "\udc80", "ub untu", "a,b", "torch", "any"]),
    st.text(max_size=5),
)
ANY = st.recursive(
    NEAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)
ADAPTER = TypeAdapter(spec.ClusterSpec)


def examples(section: Section) -> st.SearchStrategy[dict[str, Any]]:
    """Draw mappings of a section whose values are mostly as its page shows them."""
    shown = {
        name: st.sampled_from([value for value in key.key.examples if value is not None] or [None]) | ANY
        for name, key in section.keys.items()
    }
    return st.fixed_dictionaries({}, optional={**shown, "unknown": NEAR})


def asked(section: Section, plain: object) -> dict[str, Any] | None:
    try:
        return model_of(section).validate_python(plain)
    except ValidationError:
        return None


def exact(value: Any) -> str:
    """Return a value so that 1, 1.0 and True differ, and so does the order of keys."""
    return repr(value)


@pytest.mark.parametrize("section", ALL, ids=lambda section: section.title)
@given(data=st.data())
def test_what_is_certain_of_a_section_is_what_pydantic_makes_of_it(section: Section, data: st.DataObject) -> None:
    plain = data.draw(examples(section) | ANY)
    found = certain(section, plain)
    if found is not None:
        assert exact(found) == exact(asked(section, plain))


@pytest.mark.parametrize("section", ALL, ids=lambda section: section.title)
def test_every_example_of_a_key_is_certain(section: Section) -> None:
    needed = {name: key.key.examples[0] for name, key in section.keys.items() if key.required}
    for name, key in section.keys.items():
        for value in key.key.examples:
            plain = {**needed, name: value}
            if asked(section, plain) is not None:
                assert certain(section, plain) is not None, plain


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
    checkpoint=st.builds(spec.CheckpointSpec, resume=st.sampled_from(spec.Resume)),
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
    stop_after=st.none() | st.floats(0, 1e9),
)


@given(SPECS)
def test_a_spec_is_read_as_it_was_stored_whoever_stored_it(made: spec.ClusterSpec) -> None:
    assert exact(load_stored(dump(made))) == exact(made)
    assert exact(load_stored(ADAPTER.dump_json(made).decode())) == exact(made)
    assert json.loads(dump(made)) == json.loads(ADAPTER.dump_json(made))


GOOD: dict[str, Any] = {"name": "a", "path": "/a", "hosts": [{"name": "n", "host": "n"}], "job": None}


def test_what_an_earlier_version_did_not_store_has_its_default_and_what_is_unknown_is_passed_over() -> None:
    read = load_stored(json.dumps({**GOOD, "later": 1}))
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
    with pytest.raises(ValueError, match="Expecting value|nested too deeply|does not fit there|is missing"):
        load_stored(text)
