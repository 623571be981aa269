"""What a driver asks for: read from its words and numbers, and what a person is told to do about it."""

from __future__ import annotations

import pytest

from clusterctl.health.checks.gpu_failures import (
    HINTS,
    find_recovery_symptom,
    get_recovery,
    parse_new_action,
)
from clusterctl.health.findings import Action, Status
from clusterctl.health.judge import judge_node
from clusterctl.health.settings import HealthSettings, NodeDeclaration
from tests.unit.health.healthy import changed, facts

FAIL, WARN = Status.FAIL, Status.WARN


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("None", 0),
        ("GPU Reset Required", 1),
        ("GPU Reset", 1),
        ("Node Reboot Required", 2),
        ("Node Reboot", 2),
        ("Drain P2P", 3),
        ("Drain and Reset", 4),
        ("Recover IMEX Domain", 5),
        ("Bus Reset", 6),
        ("System Reboot", 7),
        ("Something New", None),
    ],
)
def test_words_without_a_number_are_understood(words: str, value: int | None) -> None:
    for text in (f"changed from 0x0 (None) to {words}", f"changed to ({words})", f"changed to {words.upper()} "):
        assert parse_new_action(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        pytest.param("changed from 0x1 to 0x2", 2, id="a number"),
        pytest.param("changed to 0x1A (Something New)", 26, id="hexadecimal"),
        pytest.param("changed to 0x1 (Node Reboot)", 1, id="the number counts"),
        pytest.param("changed to ", None, id="nothing"),
        pytest.param("to 0x2, and more", None, id="not at the end"),
        pytest.param("no change", None, id="no such text"),
    ],
)
def test_a_number_counts_and_what_cannot_be_read_is_nothing(text: str, value: int | None) -> None:
    assert parse_new_action(text) == value


@pytest.mark.parametrize(
    ("value", "words", "action", "before", "during"),
    [
        (1, "GPU reset", Action.RESET_GPU, FAIL, FAIL),
        (2, "node reboot", Action.REBOOT_NODE, FAIL, FAIL),
        (3, "drain P2P", Action.RESET_GPU, WARN, WARN),
        (4, "drain and reset", Action.RESET_GPU, FAIL, WARN),
        (5, "recover IMEX domain", Action.RESTART_FABRICMANAGER, WARN, WARN),
        (6, "bus reset", Action.RESET_GPU, FAIL, FAIL),
        (7, "system reboot", Action.REBOOT_NODE, FAIL, FAIL),
        (99, "an unknown action", Action.CONTACT_SUPPORT, FAIL, WARN),
    ],
)
def test_what_a_driver_asks_for_is_as_grave_as_it_is(
    value: int, words: str, action: Action, before: Status, during: Status
) -> None:
    asked = get_recovery(value)
    assert (asked.description, asked.action, asked.status_before_run, asked.status_during_run) == (
        words,
        action,
        before,
        during,
    )

    said = find_recovery_symptom(5, value)
    assert said is not None
    assert (said.gpu, said.check, said.status) == (5, "gpu.recovery_action", during)
    assert (said.description, said.action) == (f"the driver recommends: {words}", action)
    # What may go on is better left out of the next attempt; what fails is left out anyway.
    assert said.drains_node is (during is WARN)


@pytest.mark.parametrize("value", [0, None])
def test_a_driver_that_asks_for_nothing_is_no_sign(value: int | None) -> None:
    assert find_recovery_symptom(5, value) is None


@pytest.mark.parametrize(
    ("action", "remedy"),
    [
        (Action.RESET_GPU, "Stop all jobs on the node, then `sudo nvidia-smi -r -i N`"),
        (Action.REBOOT_NODE, "Reboot the node; if the error returns"),
        (Action.RESTART_FABRICMANAGER, "`sudo systemctl restart nvidia-imex`"),
        (Action.CONTACT_SUPPORT, "Ask your vendor; `nvidia-smi -q`"),
        (Action.CHECK_POWER_COOLING, "Check the power cables"),
    ],
)
def test_each_action_comes_with_its_remedy(action: Action, remedy: str) -> None:
    assert HINTS[action].startswith(remedy)


def test_before_a_run_a_gpu_whose_driver_asks_for_something_is_found_with_what_to_do() -> None:
    told = changed(facts(), gpu2__recovery_action=5, gpu3__recovery_action=7)
    context = HealthSettings(nodes={"n0": NodeDeclaration(gpus=8)})

    found = judge_node("n0", told, context, ["gpu.recovery_action"])

    assert [(f.gpu, f.status, f.value, f.expected, f.action) for f in found] == [
        (2, WARN, 5, 0, Action.RESTART_FABRICMANAGER),
        (3, FAIL, 7, 0, Action.REBOOT_NODE),
    ]
    assert [f.message for f in found] == [
        "GPU 2 (00000000:12:00.0): the driver recommends: recover IMEX domain",
        "GPU 3 (00000000:13:00.0): the driver recommends: system reboot",
    ]
    assert [f.hint for f in found] == [HINTS[Action.RESTART_FABRICMANAGER], HINTS[Action.REBOOT_NODE]]
