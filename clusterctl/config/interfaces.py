"""Network interfaces that join what runs on one machine, and no machines."""

from __future__ import annotations

VIRTUAL = ("docker", "br-", "veth", "virbr", "cni", "flannel", "cali", "tunl", "kube", "vnet")
"""How the names of interfaces of containers and virtual machines begin: workers of several nodes do not meet there."""
