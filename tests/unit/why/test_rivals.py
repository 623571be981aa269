"""What others would say of the same run, so that it can be set beside what `why` says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clusterctl.agent.protocol.record_types import FlightRecorderEntry
from clusterctl.why.evidence_types import Evidence
from tests.lab.why import dumps, rivals
from tests.unit.why.cases import case, elsewhere, entry, waiting

RAW = Path(__file__).parent / "raw"
"""What torch 2.13 dumped of four ranks on gloo, of which rank 2 did not come to the sixth collective."""
FOUR = range(4)


def raw() -> dict[int, Any]:
    return {rank: json.loads((RAW / f"rank_{rank}.json").read_text()) for rank in FOUR}


def entries_of(dump: dict[str, Any]) -> tuple[FlightRecorderEntry, ...]:
    """The entries of a dump as evidence holds them."""
    return tuple(
        FlightRecorderEntry(
            group=one["process_group"][0],
            number=one["collective_seq_id"],
            op=one["profiling_name"].rpartition(":")[2],
            sizes=str(one["input_sizes"]),
            dtypes=",".join(one["input_dtypes"]),
            done=one["retired"],
            p2p=one["is_p2p"],
        )
        for one in dump["entries"]
    )


def of_raw() -> Evidence:
    looks = {rank: entries_of(dump) for rank, dump in raw().items()}
    return case(*(elsewhere(entries=looks[rank]) if rank == 2 else waiting(entries=looks[rank]) for rank in FOUR))


def numbered(
    *numbers: int, op: str = "all_reduce", group: str = "0", open_: bool = True
) -> tuple[FlightRecorderEntry, ...]:
    """Entries of one group, of which the last has not ended."""
    return tuple(entry(number, op, group=group, done=not open_ or number != numbers[-1]) for number in numbers)


def test_a_dump_that_is_made_of_evidence_holds_what_torch_itself_had_dumped() -> None:
    read = ("process_group", "collective_seq_id", "profiling_name", "input_sizes", "output_sizes", "input_dtypes")
    also = ("output_dtypes", "state", "retired", "is_p2p", "record_id", "op_id", "p2p_seq_id", "pg_id")
    made = dumps.of_case(of_raw())

    for rank, dump in raw().items():
        theirs = [{name: one[name] for name in (*read, *also)} for one in dump["entries"]]
        ours = [json.loads(json.dumps({name: one[name] for name in (*read, *also)})) for one in made[rank]["entries"]]
        assert ours == theirs
        assert {k: str(v) for k, v in made[rank]["pg_status"]["0"].items()} == dump["pg_status"]["0"]
        assert dumps.nameless(made)[rank]["pg_config"] == dump["pg_config"]


@pytest.mark.parametrize(
    ("lines", "ranks"),
    [
        pytest.param(["collective: x", "missing ranks: {0, 2}", "missing ranks: {1}"], {0, 2}, id="missing"),
        pytest.param(["error msg: Culprit rank 1; Error type: X, Culprit rank 3; Error type: Y"], {1, 3}, id="unlike"),
        pytest.param(["No errors found for this collective entry"], set(), id="none"),
    ],
)
def test_whom_torchs_analyser_names_is_read_from_the_first_thing_that_it_finds(
    lines: list[str], ranks: set[int]
) -> None:
    assert rivals.first_named(lines) == ranks


def test_by_the_rule_of_nvrx_who_has_enqueued_less_is_missing() -> None:
    assert rivals.nvrx_says(dumps.of_case(of_raw())).ranks == {2}


def test_by_the_rule_of_nvrx_a_rank_without_a_dump_is_missing() -> None:
    here = waiting(entries=numbered(4, 5))

    assert rivals.nvrx_says(dumps.of_case(case(here, here, elsewhere(), here))).ranks == {2}


def test_by_the_rule_of_nvrx_nobody_is_missing_where_all_have_begun_something_under_one_number() -> None:
    all_reduce, barrier = numbered(4, 5), (*numbered(4, open_=False), entry(5, "barrier"))
    unlike = case(waiting(entries=all_reduce), waiting(entries=barrier), waiting(entries=all_reduce))

    assert rivals.nvrx_says(dumps.of_case(unlike)).ranks == frozenset()


def test_by_the_rule_of_nvrx_of_groups_that_share_ranks_the_first_tells() -> None:
    first, second = numbered(4, 5, group="1"), numbered(4, 5, group="2")
    three = case(
        waiting(entries=first),
        waiting(entries=(*numbered(4, 5, group="1", open_=False), *second)),
        elsewhere(entries=(*numbered(4, group="1", open_=False), *numbered(4, group="2", open_=False))),
    )

    assert rivals.nvrx_says(dumps.of_case(three)).ranks == {1, 2}


def test_by_the_rule_of_ray_who_has_launched_less_of_what_differs_most_is_a_suspect() -> None:
    assert rivals.ray_says(of_raw()).ranks == {2}


def test_by_the_rule_of_ray_a_barrier_counts_as_an_all_reduce() -> None:
    all_reduce, barrier = numbered(4, 5), (*numbered(4, open_=False), entry(5, "barrier"))

    assert rivals.ray_says(case(waiting(entries=all_reduce), waiting(entries=barrier))).ranks == frozenset()


def test_by_the_rule_of_ray_a_stopped_rank_does_not_answer_and_one_that_holds_the_lock_is_counted() -> None:
    here = waiting(entries=numbered(4, 5))

    assert rivals.ray_says(case(here, here, elsewhere(state="T"), here)).ranks == {2}
    assert rivals.ray_says(case(here, here, elsewhere(seq={"0": (4, 4)}), here)).ranks == {2}
