"""The places of a session's runs in the lines for GPUs (`up --wait`), until the runs are prepared.

A place is a locked file of this process, so it disappears with the session: soon after its head is gone, without a
comparison of clocks. The head chooses the number of a ticket, and keeps it if the connection breaks.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from clusterctl.agent.protocol import command_messages
from clusterctl.agent.supervisor.gpu_claims import GpuClaimError, GpuClaims, QueueView

if TYPE_CHECKING:
    from clusterctl.agent.protocol import command_payload_types
    from clusterctl.agent.serve.agent_session import AgentSession, Result

    Key = tuple[str, str]

_POLL_S = 1.0


class _Place:
    def __init__(self, run: str, node: str, gpus: list[int]) -> None:
        self.claims, self.gpus, self.since = GpuClaims(run, node), gpus, round(time.time())
        self.last: QueueView | None = None
        self.request_id: int | None = None


class GpuQueue:
    """Handles the command `queue` of one session.

    Args:
        session: The session, whose loop looks once a second at what the runs wait for.
    """

    def __init__(self, session: AgentSession) -> None:
        self._session = session
        self._places: dict[Key, _Place] = {}
        self._is_polling = False
        session.end_actions.append(self._leave_all)

    def handle(self, request_id: int, arguments: command_payload_types.QueueArguments, _epoch: int | None) -> Result:
        """Look, wait with a ticket, or claim the GPUs. The answer to one who waits follows when it changes."""
        key = str(arguments["run"]), str(arguments["node"])
        gpus = [int(index) for index in arguments["gpus"]]
        try:
            if arguments["number"] is None:
                self.leave(key)
                return GpuClaims(*key, head=str(arguments["head"])).survey(gpus)._asdict()
            place = self._places.setdefault(key, _Place(*key, gpus))
            place.gpus, place.claims.head = gpus, str(arguments["head"])
            if place.request_id is not None and place.last is not None:
                # The head has a newer request, so it needs no answer to the earlier one.
                self._session.answer(place.request_id, place.last._asdict())
                place.request_id = None
            about = {"name": arguments["name"], "head": arguments["head"], "since": place.since}
            place.claims.take_ticket(int(arguments["number"]), gpus, about)
            if arguments["claim"]:
                place.last = None
                place.claims.claim(gpus)
                place.claims.announce({"kind": "run"})
                return place.claims.survey(gpus)._asdict()
        except GpuClaimError as error:
            raise command_messages.make_refused_error(str(error)) from error
        place.request_id = request_id
        if not self._is_polling:
            self._is_polling = True
            self._session.loop.call_repeatedly(_POLL_S, self._poll)
        self._poll()
        return None

    def leave(self, key: Key) -> None:
        """Give back the place and the claims of a run."""
        place = self._places.pop(key, None)
        if place is not None:
            place.claims.release()

    def _leave_all(self) -> None:
        for key in list(self._places):
            self.leave(key)

    def _poll(self) -> None:
        for place in self._places.values():
            if place.request_id is None:
                continue
            try:
                view = place.claims.survey(place.gpus)
            except (GpuClaimError, OSError) as error:
                self._session.answer_error(place.request_id, command_messages.make_refused_error(str(error)))
                place.request_id = None
                continue
            if view != place.last:
                place.last = view
                self._session.answer(place.request_id, view._asdict())
                place.request_id = None
