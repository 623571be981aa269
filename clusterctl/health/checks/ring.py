"""Whether data gets from each node to the next and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clusterctl.formatting import format_size
from clusterctl.health.check import View, node_check
from clusterctl.health.model import Action, Outcome, fail, ok, skip, unknown, warn

if TYPE_CHECKING:
    from collections.abc import Iterator

_WHY = {
    "refused": "connection refused",
    "timeout": "no answer: a firewall drops the packets",
    "unreachable": "no route",
    "wrong answer": "something else answers there",
    "hung up": "the connection was cut in the middle",
}
_PACKETS = (
    "Packets of full size are lost: compare the MTU of both nodes with what switches, VLAN, VXLAN or VPN between them "
    "let through (`ping -M do -s 1472 ADDRESS`, 8972 for jumbo frames)"
)


@node_check(
    name="net.ring",
    family="Rendezvous",
    source=(
        "each worker connects to the next one at a port that the kernel picks, as NCCL and Gloo do, sends 256 KiB and "
        "gets them back; each spare does so with one worker, and it with the spare; 4 s for all of it"
    ),
    threshold=(
        "all of it arrives; where the time was up first: FAIL if nothing had moved for `still` seconds, else WARN"
    ),
    severity="FAIL",
    remedy="Open all ports above 1023 between the nodes, in both directions (nccl#388, nccl#1524)",
    action=Action.FIX_CONFIG,
    thresholds={"still": 1.0},
)
def ring(view: View) -> Iterator[Outcome]:
    """Data gets from node to node and back, at any port and in packets of any size."""
    tried = view.controller.get("ring")
    if tried is None:
        met = view.controller.get("rendezvous") or {}
        why = "the node was not met (`net.rendezvous`)" if met and not met.get("ok") else "no way was tried"
        yield unknown(why) if view.context.multi_node else skip("only one node")
        return
    bad = [_trouble(view, way) for way in tried if not way["ok"]]
    yield from bad
    if not tried:
        yield skip("no other node was met")
    elif not bad:
        slowest = max(float(way["ms"]) for way in tried)
        yield ok(
            f"{', '.join(way['to'] for way in tried)}: {format_size(tried[0]['payload'])} there and back", value=slowest
        )


def _trouble(view: View, way: dict[str, Any]) -> Outcome:
    if way["ok"] is None:
        return unknown(f"{way['from']} to {way['to']} could not be tried: {way.get('error')}")
    words, error = f"{way['from']} to {way['to']} at {way['address']}:{way['port']}", str(way.get("error"))
    sent, received, payload = way.get("sent") or 0, way.get("received") or 0, way.get("payload") or 0
    if error != "timeout" or not (sent or received or way.get("still")):
        return fail(f"{words}: {_WHY.get(error, error)}", value=error)
    where = (
        f"{format_size(sent)} of {format_size(payload)} got there"
        if sent < payload
        else f"{format_size(received)} of {format_size(payload)} came back"
    )
    if way["still"] < view.limit("still"):
        return warn(f"{words}: only {where} in {way['ms'] / 1000:.0f} s", value=received, expected=payload)
    message = f"{words}: it connects and answers, but then only {where}"
    return fail(message, value=received, expected=payload, hint=_PACKETS)


CHECKS = (ring,)
