"""Records that do not change, made without `dataclasses`, and what the start of an agent imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import clusterctl
from clusterctl.agent.protocol.frozen_dataclass import frozen_dataclass

_COSTLY = {
    "dataclasses",
    "inspect",
    "selectors",
    "shutil",
    "socket",
    "tempfile",
    "typing",
    "urllib.parse",
}


@frozen_dataclass(frozen=True)
class Pair:
    left: int
    right: str = "r"

    @property
    def both(self) -> str:
        return f"{self.left}{self.right}"


def test_fields_are_given_by_place_by_name_or_by_default() -> None:
    assert [Pair(1).both, Pair(1, "x").both, Pair(right="y", left=2).both] == ["1r", "1x", "2y"]


def test_equal_fields_make_equal_values_with_equal_hashes() -> None:
    assert {Pair(1), Pair(1, "r"), Pair(2)} == {Pair(1), Pair(2)}


def test_a_value_equals_nothing_of_another_kind() -> None:
    other: object = (1, "r")
    assert Pair(1) != other


def test_a_value_does_not_change() -> None:
    with pytest.raises(AttributeError, match=r"Pair.left"):
        Pair(1).left = 2  # type: ignore[misc]


def test_a_value_shows_its_fields() -> None:
    assert repr(Pair(1)) == "Pair(left=1, right='r')"


def test_a_value_is_matched_by_place() -> None:
    match Pair(1, "x"):
        case Pair(left, right):
            assert (left, right) == (1, "x")


@pytest.mark.parametrize(
    ("places", "names"),
    [
        pytest.param((), {}, id="missing"),
        pytest.param((1, "x", 3), {}, id="too many"),
        pytest.param((1,), {"left": 1}, id="twice"),
        pytest.param((1,), {"middle": 1}, id="unknown"),
    ],
)
def test_wrong_fields_are_refused(places: tuple[object, ...], names: dict[str, object]) -> None:
    with pytest.raises(TypeError, match="has the fields left, right"):
        Pair(*places, **names)  # type: ignore[arg-type]


def test_an_agent_that_is_asked_for_a_command_imports_none_of_the_costly_modules() -> None:
    root = Path(clusterctl.__file__).parents[1]
    code = f"import sys; sys.path.insert(0, {str(root)!r}); from clusterctl.agent.serve import main; "
    flags = ["-I", "-S", "-X", "utf8"]
    done = subprocess.run(
        [sys.executable, *flags, "-c", code + "print(*sys.modules)"], capture_output=True, text=True, check=True
    )
    assert _COSTLY.isdisjoint(done.stdout.split())
