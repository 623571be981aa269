"""What may differ between the environment in which a zygote imports and that of a rank."""

from __future__ import annotations

from clusterctl.agent.inject.forked import threads
from clusterctl.agent.supervisor.forking import rules

SHARED = {b"PATH": b"/bin", b"KERAS_BACKEND": b"torch", b"OMP_NUM_THREADS": b"8"}


def test_a_zygote_has_what_all_workers_have_and_one_thread() -> None:
    env = rules.environment({**SHARED, b"CLUSTERCTL_STATUS_DIR": b"/x", b"TORCHELASTIC_ERROR_FILE": b"/y"})
    assert (env[b"PATH"], env[b"KERAS_BACKEND"], env[b"OMP_NUM_THREADS"]) == (b"/bin", b"torch", b"1")
    assert env[b"PYTORCH_NVML_BASED_CUDA_CHECK"] == b"1"
    assert not env.keys() & {b"CLUSTERCTL_STATUS_DIR", b"TORCHELASTIC_ERROR_FILE"}


def test_what_only_ranks_are_told_may_differ() -> None:
    rank = {**SHARED, b"RANK": b"3", b"MASTER_ADDR": b"10.0.0.1", b"TOKEN": b"t", b"CLUSTERCTL_ATTEMPT": b"2"}
    assert rules.differing(rules.environment(SHARED), rank, ["TOKEN"]) == []


def test_what_else_differs_is_named() -> None:
    rank = {b"PATH": b"/sbin", b"OMP_NUM_THREADS": b"4", b"CUDA_VISIBLE_DEVICES": b"1"}
    assert rules.differing(rules.environment(SHARED), rank, []) == ["CUDA_VISIBLE_DEVICES", "KERAS_BACKEND", "PATH"]


def test_both_sides_know_the_same_variables_of_threads() -> None:
    assert threads.NAMES == rules.THREADS
