"""The command lines of container runtimes."""

from __future__ import annotations

from typing import Any

import pytest

from clusterctl.agent.environment import container_commands
from clusterctl.agent.environment.container_commands import ContainerRun, Mount

HOST = "--pid host --network host --security-opt label=disable"
NAMED = "run --detach --rm --pull never --name c --label clusterctl"
MOUNTS = [Mount("/state", "/state"), Mount("/sets", "/data", "ro")]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        pytest.param({"runtime": "podman"}, f"podman {NAMED} {HOST} --volume", id="podman of root"),
        pytest.param(
            {"runtime": "podman", "uid": 1000, "gid": 100},
            f"{HOST} --userns keep-id --user 1000:100 --volume",
            id="rootless",
        ),
        pytest.param(
            {"runtime": "docker", "uid": 1000, "gid": 100},
            f"docker {NAMED} {HOST} --user 1000:100 --volume",
            id="docker",
        ),
        pytest.param({"runtime": "docker"}, f"{HOST} --userns host --volume", id="docker of root"),
        pytest.param(
            {"runtime": "podman", "vendor": "nvidia"}, "--device nvidia.com/gpu=all --volume", id="podman CDI"
        ),
        pytest.param({"runtime": "docker", "vendor": "nvidia"}, "--gpus all --volume", id="docker GPUs"),
        pytest.param({"runtime": "docker", "vendor": "amd"}, "--device /dev/kfd --device /dev/dri --volume", id="amd"),
        pytest.param(
            {"runtime": "podman", "args": ["--ulimit", "nofile=1024"]},
            "--volume /state:/state --volume /sets:/data:ro --ulimit nofile=1024 --entrypoint /bin/sh i -c",
            id="args",
        ),
    ],
)
def test_a_container_shares_all_but_its_files_with_the_node(fields: dict[str, Any], words: str) -> None:
    run = ContainerRun(**{"image": "i", "name": "c", "fifo": "/state/f", "mounts": MOUNTS, **fields})
    assert words in " ".join(container_commands.build_run_command(run))


@pytest.mark.parametrize(
    ("vendor", "option"), [("nvidia", "--nv "), ("amd", "--rocm "), (None, "")], ids=["nvidia", "amd", "no GPU"]
)
def test_apptainer_runs_in_the_background_with_the_files_that_are_bound(vendor: str | None, option: str) -> None:
    run = ContainerRun("apptainer", "/i.sif", "c", "/state/f", MOUNTS, ["--writable-tmpfs"], vendor=vendor)
    shell, *rest = container_commands.build_run_command(run)
    assert (shell, rest[2]) == ("sh", "/state/f.err")
    wanted = (
        f"apptainer exec --no-home {option}--bind /state:/state --bind /sets:/data:ro --writable-tmpfs /i.sif /bin/sh"
    )
    assert " ".join(rest[3:]).startswith(wanted)


@pytest.mark.parametrize(
    ("text", "mount"),
    [
        ("/data", Mount("/data", "/data")),
        ("~/sets", Mount("/home/me/sets", "/home/me/sets")),
        ("/a:/b", Mount("/a", "/b")),
        ("~/a:/b:ro", Mount("/home/me/a", "/b", "ro")),
        ("/a:ro", Mount("/a", "/a", "ro")),
    ],
    ids=str,
)
def test_a_mount_may_name_a_target_and_options(text: str, mount: Mount) -> None:
    assert container_commands.parse_mount(text, "/home/me") == mount


def test_a_folder_inside_another_one_is_not_mounted_twice() -> None:
    mounts = container_commands.list_mounts(["/a/b/", "/a", "/ab", "/a"], ["/a/b"], "/")
    assert [mount.source for mount in mounts] == ["/a", "/ab", "/a/b"]


@pytest.mark.parametrize(
    ("image", "registry"),
    [
        ("ubuntu", ("registry-1.docker.io", 443)),
        ("me/image:1", ("registry-1.docker.io", 443)),
        ("nvcr.io/nvidia/pytorch:26.09-py3", ("nvcr.io", 443)),
        ("reg.local:5000/a", ("reg.local", 5000)),
        ("localhost/a", None),
        ("docker://ghcr.io/a/b", ("ghcr.io", 443)),
    ],
    ids=str,
)
def test_the_registry_is_in_the_name_of_an_image(image: str, registry: object) -> None:
    assert container_commands.get_registry(image) == registry


@pytest.mark.parametrize(
    ("runtime", "commands"),
    [
        pytest.param("docker", ["docker pull a/b", "docker load --input /p.tar", "docker rm --force c"], id="docker"),
        pytest.param("podman", ["podman pull a/b", "podman load --input /p.tar", "podman rm --force c"], id="podman"),
        pytest.param(
            "apptainer",
            [
                "apptainer pull --force /e/images/a-b-07f4401c.sif docker://a/b",
                "apptainer build --force /e/images/a-b-07f4401c.sif docker-archive:/p.tar",
                "",
            ],
            id="apptainer",
        ),
    ],
)
def test_an_image_is_pulled_or_loaded_and_a_container_removed(runtime: str, commands: list[str]) -> None:
    file = container_commands.get_image_file("/e", "a/b")
    built = [
        container_commands.build_pull_command(runtime, "a/b", file),
        container_commands.build_load_command(runtime, "/p.tar", file),
        container_commands.build_remove_command(runtime, "c") or [],
    ]
    assert [" ".join(words) for words in built] == commands


def test_an_image_of_apptainer_may_be_a_file_of_the_node() -> None:
    assert container_commands.get_image_file("/e", "/images/torch.sif") == "/images/torch.sif"
