"""What the login of a node sets, and what becomes of it in the ranks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.e2e.conftest import MakeHead


def test_a_wrong_interface_of_a_login_is_replaced_by_name_and_its_other_settings_stay(make_head: MakeHead) -> None:
    head = make_head()
    head.env.update(NCCL_SOCKET_IFNAME="nosuch0", OMP_NUM_THREADS="3")
    command = 'echo "$NCCL_SOCKET_IFNAME $GLOO_SOCKET_IFNAME $OMP_NUM_THREADS"'
    head.write_local({"command": command}, workers=(1, 1))

    done = head.run("up")

    assert done.returncode == 0, done.stderr
    assert "=lo lo 3" in done.stdout
    assert "localhost.[0-1]: NCCL_SOCKET_IFNAME=nosuch0 of its login is replaced by =lo" in done.stderr


def test_asked_for_it_config_names_what_the_login_sets_and_hides_what_looks_like_a_secret(make_head: MakeHead) -> None:
    head = make_head()
    head.env.update(OMP_NUM_THREADS="3", OF_LOGIN="1", HUB_TOKEN="hush")
    head.write_local({"command": "true"}, workers=(1, 1), env={"OF_LOGIN": "2"})

    done = head.run("config", "--env", "1", "--live", "--json")

    found = json.loads(done.stdout)
    assert found["OMP_NUM_THREADS"] == {"value": "3", "source": "login of localhost.1"}
    assert found["OF_LOGIN"]["value"] == "2"
    assert found["MASTER_ADDR"] == {"value": "127.0.0.1", "source": "clusterctl"}
    assert "hush" not in done.stdout
