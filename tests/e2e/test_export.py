"""`export` tells on stderr what of the file does not hold in what it prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.e2e.conftest import MakeHead


def test_what_is_left_out_is_said_and_hosts_can_be_left_out(make_head: MakeHead) -> None:
    head = make_head()
    (head.folder / "cluster.yaml").write_text(
        "version: 1\nhosts: {gpu01: 2, gpu02: 4, gpu03: {gpus: 2, role: spare}}\njob: {command: echo}\nstall: {action: stop}\n"
    )

    refused = head.run("export", "k8s")
    assert refused.returncode == 6
    assert "`gpus` is 2 on gpu01 and 4 on gpu02" in refused.stderr
    assert "hint: `--exclude gpu02`" in refused.stderr

    made = head.run("export", "k8s", "--exclude", "gpu02")
    assert made.returncode == 0, made.stderr
    assert "warning: not carried over: `stall.action`\nwarning: `hosts[].role`: spares get no pods\n" in made.stderr
    assert "# not carried over: `stall.action`" in made.stdout
    with_image = head.run("export", "k8s", "--exclude", "gpu02", "--set", "environment.container.image=lab/tools:1")
    assert 'image: "lab/tools:1"' in with_image.stdout, with_image.stderr
    assert "no worker host is left" in head.run("export", "k8s", "--nodes", "gpu03").stderr
