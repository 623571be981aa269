"""Which client enters a host, where it is found out more than once."""

from __future__ import annotations

from clusterctl.config.spec import HostSpec, SshSpec
from clusterctl.errors import AgentError
from clusterctl.transport.fallback_to_openssh import FallbackTransport
from clusterctl.transport.local import LocalTransport
from clusterctl.transport.openssh import OpenSshTransport
from clusterctl.transport.ssh.underlying_stream import PreDialer


def test_every_session_that_met_a_restricted_shell_goes_by_ssh_whoever_met_it_first() -> None:
    predialer = PreDialer()
    either = FallbackTransport(LocalTransport(), OpenSshTransport(SshSpec(), predialer), predialer)
    host = HostSpec(name="n1", host="n1")
    error = AgentError("n1", "the connection broke; it said: 'rbash: /bin/sh: restricted'")
    assert [either.switch_to_openssh(host, error), either.switch_to_openssh(host, error)] == [True, True]
    assert not either.switch_to_openssh(host, AgentError("n1", "no Python found"))
