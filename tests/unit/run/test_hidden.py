"""What a bundle that is handed on no longer tells."""

from __future__ import annotations

import json

import pytest

from clusterctl.run.record.run_bundle import redact_bytes


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        pytest.param("password=hunter2 and more", "password=*** and more", id="bare"),
        pytest.param('HF_TOKEN = "abc"', 'HF_TOKEN = "***"', id="quoted"),
        pytest.param("{'api_key': 'abc', 'lr': 1}", "{'api_key': '***', 'lr': 1}", id="a dict of Python"),
        pytest.param("reached 10.1.2.3 and 10.1.2.3", "reached 192.0.2.1 and 192.0.2.1", id="one address twice"),
        pytest.param("from 10.1.2.3 to fd00::7", "from 192.0.2.1 to 192.0.2.2", id="two addresses"),
        pytest.param("10.1.2.3:29500, tcp://10.1.2.4:1.", "192.0.2.1:29500, tcp://192.0.2.2:1.", id="ports"),
        pytest.param("it is 10.1.2.3.", "it is 192.0.2.1.", id="at the end of a sentence"),
        pytest.param("fd00::7 is FD00:0::7", "192.0.2.1 is 192.0.2.1", id="two spellings of one address"),
        pytest.param("::ffff:10.1.2.3 is 10.1.2.3", "::ffff:192.0.2.1 is 192.0.2.1", id="an address within another"),
        pytest.param("127.0.0.1:29500 and ::1", "127.0.0.1:29500 and ::1", id="the machine itself"),
        pytest.param("torch 2.13.0 at 12:30:45", "torch 2.13.0 at 12:30:45", id="versions and times"),
        pytest.param(
            '["t.py", "--hf-token", "ab\\"c", "x"]', '["t.py", "--hf-token", "***", "x"]', id="a list of words"
        ),
        pytest.param("t.py --api-key abc --lr 1", "t.py --api-key *** --lr 1", id="a command line"),
        pytest.param(
            '["--token", "--lr"] --token --lr', '["--token", "***"] --token --lr', id="an option without value"
        ),
        pytest.param("/home/ada/train.py", "/home/user/train.py", id="a home"),
    ],
)
def test_it_shows(text: str, shown: str) -> None:
    assert redact_bytes(text.encode()).decode() == shown


@pytest.mark.parametrize(
    "value",
    [
        {"password": "hunter2"},
        {"tail": 'password="hunter2" and'},
        {"tail": "token='hunter2'\n"},
        {"tail": "secret: hunter2"},
    ],
)
def test_what_was_json_stays_json(value: dict[str, str]) -> None:
    told = redact_bytes(json.dumps(value).encode())

    assert json.loads(told)
    assert b"hunter2" not in told


def test_as_many_addresses_stay_different_as_there_are() -> None:
    addresses = [f"10.{i >> 16}.{i >> 8 & 255}.{i & 255}" for i in range(70_000)]
    shown = redact_bytes(" ".join(addresses).encode()).decode().split()

    assert len(set(shown)) == len(addresses)
    assert not set(shown) & set(addresses)
