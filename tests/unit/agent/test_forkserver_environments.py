"""What may differ between the environment in which a forkserver imports and that of a rank."""

from __future__ import annotations

from clusterctl.agent.supervisor import forkserver_manager

SHARED = {b"PATH": b"/bin", b"KERAS_BACKEND": b"torch", b"OMP_NUM_THREADS": b"8"}


def test_a_forkserver_has_what_all_workers_have() -> None:
    workers = {**SHARED, b"CLUSTERCTL_STATUS_DIR": b"/x", b"TORCHELASTIC_ERROR_FILE": b"/y", b"RANK": b"0"}
    env = forkserver_manager.build_forkserver_environment(workers, 7, "/shim")
    assert {name: env[name] for name in SHARED} == SHARED
    assert env[b"PYTORCH_NVML_BASED_CUDA_CHECK"] == b"1"
    assert env[b"CLUSTERCTL_FORKSERVER"].startswith(b"7:")
    assert not env.keys() & {b"CLUSTERCTL_STATUS_DIR", b"TORCHELASTIC_ERROR_FILE", b"RANK"}


def test_its_own_variables_are_the_last_so_that_those_of_a_rank_find_room_there() -> None:
    env = forkserver_manager.build_forkserver_environment({b"PYTHONPATH": b"/own", **SHARED}, 7, "/shim")
    assert list(env)[-3:] == [b"CLUSTERCTL_FORKSERVER", b"PYTORCH_NVML_BASED_CUDA_CHECK", b"PYTHONPATH"]
    assert env[b"PYTHONPATH"] == b"/shim:/own"


def test_what_only_ranks_are_told_may_differ() -> None:
    rank = {**SHARED, b"RANK": b"3", b"MASTER_ADDR": b"10.0.0.1", b"TOKEN": b"t", b"CLUSTERCTL_ATTEMPT": b"2"}
    assert forkserver_manager.list_differing_variables(SHARED, rank, ["TOKEN"]) == []


def test_what_else_differs_is_named() -> None:
    rank = {b"PATH": b"/sbin", b"OMP_NUM_THREADS": b"8", b"CUDA_VISIBLE_DEVICES": b"1"}
    assert forkserver_manager.list_differing_variables(SHARED, rank, []) == [
        "CUDA_VISIBLE_DEVICES",
        "KERAS_BACKEND",
        "PATH",
    ]
