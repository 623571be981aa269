"""Months in minutes, in their short form: nothing that a run keeps grows without a bound. `make soak` plays it in full."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.agent.protocol import run_files
from clusterctl.run.record import run_dir_writer
from tests.soak import followed, node, processes, restarts

MB = 1e6
KIB = 1024


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> node.Played:
    """Ten days of a run of 8 ranks that write 10^9 lines."""
    folder: Path = tmp_path_factory.mktemp("soak")
    return node.play(folder, 8, seconds=60, real=0.05, hours=240, lines=1e9, still=4)


def test_ten_days_and_a_billion_lines_were_played(played: node.Played) -> None:
    assert played.days > 10
    assert played.lines > 0.99e9
    assert played.after.disk["samples"] > 1 * MB


def test_the_output_that_a_node_holds_stays_within_its_limit_however_long_it_runs(played: node.Played) -> None:
    assert played.after.disk["output"] <= played.ranks * (node.MAX_SIZE + node.RESERVE + (1 << 20))


def test_the_index_that_a_node_holds_stays_within_what_its_output_needs_however_long_it_runs(
    played: node.Played,
) -> None:
    assert played.written["index"] > 1 * MB * played.ranks
    assert played.after.disk["index"] <= played.ranks * 256 * KIB


def test_the_samples_that_a_node_holds_stay_within_64_mib_however_long_it_runs(played: node.Played) -> None:
    assert played.after.disk["samples"] <= run_files.MAX_SAMPLES_BYTES + (4 << 20)


def test_the_journal_of_a_run_that_goes_well_stays_small_however_long_it_runs(played: node.Played) -> None:
    assert played.after.disk["journal"] <= 2 << 20


def test_memory_and_descriptors_of_a_run_do_not_grow_while_it_goes_on(played: node.Played) -> None:
    assert played.after.descriptors <= played.before.descriptors + 2
    assert played.after.memory_mb <= played.before.memory_mb + 4
    assert played.peak_mb <= 40


def test_what_guards_a_run_uses_little_of_a_processor(played: node.Played) -> None:
    assert played.cpu <= 0.05 * node.DAY


def test_a_node_holds_no_more_descriptors_after_many_restarts_and_little_more_of_all_else(tmp_path: Path) -> None:
    found = restarts.on_node(tmp_path, 8, 15)
    for process, one in found.items():
        assert one.descriptors <= 3, process
        assert one.memory_kb <= 8 * one.ranks, process
        assert one.bytes_each <= one.ranks * 24 * KIB, process


@pytest.mark.parametrize("ranks", [8, 128])
def test_a_head_holds_no_more_descriptors_after_many_restarts_and_little_more_of_all_else(
    tmp_path: Path, ranks: int
) -> None:
    one = processes.alone(restarts.on_head, tmp_path, ranks, 800 // ranks)
    assert one.descriptors == 0
    assert one.memory_kb <= 8 * one.ranks
    assert one.bytes_each <= one.ranks * 12 * KIB
    assert one.asked_bytes <= KIB


@pytest.fixture(scope="module")
def headed(tmp_path_factory: pytest.TempPathFactory) -> followed.Followed:
    """Hours of a run of 8 ranks and its controller, each of which ends a connection amid what it carries."""
    folder: Path = tmp_path_factory.mktemp("headed")
    return followed.play(folder, 8, seconds=100, real=0.05, hours=8, lines=360, samples=4 * MB)


def test_however_often_a_connection_breaks_amid_the_output_the_head_has_each_byte_once(
    headed: followed.Followed,
) -> None:
    assert headed.after.reconnects >= 5
    assert headed.differing == []


def test_a_reconnect_asks_in_at_most_1_kib_of_8_ranks(headed: followed.Followed) -> None:
    assert headed.asked <= KIB


def test_reconnects_cost_the_head_no_descriptor(headed: followed.Followed) -> None:
    assert headed.after.descriptors <= headed.before.descriptors


def test_a_reconnect_adds_at_most_1_kib_to_the_journal_of_the_controller(headed: followed.Followed) -> None:
    assert headed.events <= KIB


def test_what_comes_from_a_node_is_what_is_new_and_what_a_reconnect_compares(headed: followed.Followed) -> None:
    compared = (2 * headed.ranks + 1) * 64 * KIB * 4 / 3
    assert headed.came <= 1.1 * headed.stored + headed.after.reconnects * (compared + MB)


def test_of_samples_the_head_keeps_16_mib_of_a_node_however_long_it_runs(headed: followed.Followed) -> None:
    assert headed.stored > 24 * MB
    assert headed.after.disk["samples"] <= run_dir_writer.MAX_SAMPLES_BYTES + (1 << 20)


def test_what_the_head_writes_in_a_day_is_what_the_node_does_and_stays_within_what_is_promised(
    headed: followed.Followed,
) -> None:
    for kind in ("samples", "index", "journal"):
        assert headed.on_head[kind] == pytest.approx(headed.on_node[kind], rel=0.15)
    assert headed.ranks * MB < headed.on_head["index"] <= headed.ranks * 1.4 * MB
    assert 20 * MB < headed.on_head["samples"] <= 35 * MB
    assert headed.on_head["journal"] == 0
    assert headed.on_head["events"] - headed.clocks <= MB / 10


def test_a_controller_takes_no_more_memory_the_longer_its_run_lasts(headed: followed.Followed) -> None:
    assert headed.after.memory_mb <= headed.before.memory_mb + 8
    assert headed.after.peak_mb <= 100
