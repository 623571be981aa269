"""Why an attempt is ended: told by a controller, or by the node that does it."""

from __future__ import annotations

from enum import Enum


class StopReason(str, Enum):
    """Who or what asked for the end of an attempt."""

    PEER_FAILED = "peer_failed"
    CANCELLED = "cancelled"
    STALLED = "stalled"
    TIME_LIMIT = "time_limit"
    FENCE = "fence"
    NODE_LOST = "node_lost"
    START_FAILED = "start_failed"
    RESTART = "restart"
    UNHEALTHY = "unhealthy"
    PORT_TAKEN = "port_taken"
