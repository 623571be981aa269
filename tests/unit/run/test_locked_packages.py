"""Which file of a locked package a platform gets, as tables."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.errors import EnvironmentFailed
from clusterctl.run.environments.locked_packages import Platform, list_requirements, select_files

DEBIAN = Platform("x86_64", "glibc 2.36", "3.11")
OLD = Platform("x86_64", "glibc 2.17", "3.11")
ARM = Platform("aarch64", "glibc 2.35", "3.11")
ALPINE = Platform("x86_64", "musl", "3.12")


def wheel(tags: str, name: str = "pack-1.0", digest: str = "ab") -> dict[str, Any]:
    return {"url": f"https://files/{name}-{tags}.whl", "hashes": {"sha256": digest}}


def package(*wheels: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"name": "pack", "version": "1.0", "wheels": list(wheels), **more}


SDIST = {"url": "https://files/pack-1.0.tar.gz", "hashes": {"sha256": "cd"}}
CP311, ABI3 = "cp311-cp311-manylinux_2_28_x86_64", "cp38-abi3-manylinux_2_17_x86_64.manylinux2014_x86_64"
PURE = "py3-none-any"


@pytest.mark.parametrize(
    ("platform", "tags", "chosen"),
    [
        pytest.param(DEBIAN, [PURE, ABI3, CP311], CP311, id="the most specific one"),
        pytest.param(OLD, [PURE, ABI3, CP311], ABI3, id="an old libc takes what it can run"),
        pytest.param(OLD, [CP311, PURE], PURE, id="a pure one runs anywhere"),
        pytest.param(DEBIAN, ["cp311-cp311-manylinux1_x86_64", PURE], "cp311-cp311-manylinux1_x86_64", id="old names"),
        pytest.param(
            ARM, [CP311, "cp311-cp311-manylinux_2_28_aarch64"], "cp311-cp311-manylinux_2_28_aarch64", id="arm"
        ),
        pytest.param(ALPINE, ["cp312-cp312-musllinux_1_2_x86_64"], "cp312-cp312-musllinux_1_2_x86_64", id="musl"),
    ],
)
def test_a_platform_gets_the_file_that_fits_best(platform: Platform, tags: list[str], chosen: str) -> None:
    (file,) = select_files({"packages": [package(*map(wheel, tags), sdist=SDIST)]}, platform)
    assert (file.filename, file.is_source) == (f"pack-1.0-{chosen}.whl", False)


@pytest.mark.parametrize(
    ("marker", "platform", "is_wanted"),
    [
        ("sys_platform == 'linux'", DEBIAN, True),
        ("sys_platform == 'win32'", DEBIAN, False),
        ("python_full_version < '3.11'", DEBIAN, False),
        ("python_full_version >= '3.11'", DEBIAN, True),
        ("platform_machine == 'aarch64' and sys_platform == 'linux'", ARM, True),
        ("platform_machine == 'aarch64' and sys_platform == 'linux'", DEBIAN, False),
    ],
)
def test_a_marker_is_that_of_the_nodes_not_of_the_head(marker: str, platform: Platform, is_wanted: bool) -> None:
    assert len(select_files({"packages": [package(wheel(PURE), marker=marker)]}, platform)) == is_wanted


def test_a_package_without_a_fitting_wheel_is_built_of_its_source() -> None:
    (file,) = select_files({"packages": [package(wheel(CP311), sdist=SDIST)]}, ARM)
    assert (file.filename, file.is_source) == ("pack-1.0.tar.gz", True)


@pytest.mark.parametrize(
    ("packed", "words"),
    [
        pytest.param(
            package(wheel(CP311)), "pack 1.0 has no file for Python 3.11 on aarch64 with glibc 2.35", id="machine"
        ),
        pytest.param(package(wheel(CP311)), "it has files for cp311-cp311-manylinux_2_28_x86_64", id="what there is"),
        pytest.param(package(), "pack 1.0 has no file for", id="no file"),
        pytest.param(package({"url": "https://files/pack-1.0-py3-none-any.whl"}), "no SHA-256", id="no hash"),
        pytest.param(package(vcs={"url": "https://git/pack"}), "pack 1.0 comes from `https://git/pack`", id="git"),
        pytest.param({"name": "own", "directory": {"path": "../own"}}, "own comes from `../own`", id="folder"),
    ],
)
def test_a_lock_that_does_not_fit_names_package_and_platform(packed: dict[str, Any], words: str) -> None:
    with pytest.raises(EnvironmentFailed) as caught:
        select_files({"packages": [packed]}, ARM)
    assert words in str(caught.value)
    assert caught.value.exit_code == 5


def test_packages_that_need_another_python_name_both_versions() -> None:
    with pytest.raises(EnvironmentFailed, match=r"need Python >=3\.12, not 3\.11"):
        select_files({"requires-python": ">=3.12", "packages": []}, DEBIAN)


@pytest.mark.parametrize(
    ("platform", "name"),
    [
        (DEBIAN, "x86_64-manylinux_2_36"),
        (Platform("x86_64", "glibc 2.30", "3.11"), "x86_64-manylinux_2_28"),
        (Platform("x86_64", "glibc 2.99", "3.11"), "x86_64-manylinux_2_40"),
        (OLD, "x86_64-manylinux_2_17"),
        (ALPINE, "x86_64-unknown-linux-musl"),
    ],
)
def test_uv_is_told_a_platform_that_it_knows(platform: Platform, name: str) -> None:
    assert platform.uv_name == name


def test_a_requirement_names_version_and_hash_or_the_place_where_a_node_gets_it() -> None:
    (file,) = select_files({"packages": [package(wheel(PURE))]}, DEBIAN)
    lines = list(list_requirements([(file, "ab", None), (file, "ab", file.url)]))
    assert lines == [
        "pack==1.0 --hash=sha256:ab",
        "pack @ https://files/pack-1.0-py3-none-any.whl --hash=sha256:ab",
    ]


@given(minors=st.lists(st.integers(5, 60), min_size=1, max_size=5), libc=st.integers(17, 60))
def test_no_node_gets_a_file_for_a_newer_libc_than_its_own(minors: list[int], libc: int) -> None:
    wheels = [wheel(f"cp311-cp311-manylinux_2_{minor}_x86_64") for minor in minors]
    files = select_files({"packages": [package(*wheels, sdist=SDIST)]}, Platform("x86_64", f"glibc 2.{libc}", "3.11"))
    fitting = [minor for minor in minors if minor <= libc]
    expected = f"pack-1.0-cp311-cp311-manylinux_2_{max(fitting)}_x86_64.whl" if fitting else "pack-1.0.tar.gz"
    assert [file.filename for file in files] == [expected]
