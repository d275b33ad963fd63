"""Prefix-aware routing as a request router of Ray Serve."""

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from .forwarding import Forwarded
from .prefix_routing import PrefixRouting


class PrefixRouter(RequestRouter):
    """Sends prompts that begin alike to the same replica, within a bound on its load."""

    def initialize_state(self, bound: int) -> None:
        """Called by Ray Serve with the options of the deployment."""
        self.routing = PrefixRouting(bound)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The candidates, the best first, each a rank of its own.

        Args:
            candidate_replicas: the replicas that can be chosen.
            pending_request: the request, if it is known.
        """
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        return [[by_id[name]] for name in self.routing.order(hashes_of(pending_request), list(by_id))]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Remember where a request went.

        Args:
            pending_request: the request.
            replica_id: the id of the replica that accepted it.
            result: its response, which is not used.
        """
        self.routing.sent(hashes_of(pending_request), replica_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Count a request as ended."""
        self.routing.ended(replica_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget the requests of a replica that has died."""
        super().on_replica_actor_died(replica_id)
        self.routing.died(replica_id)


def hashes_of(pending_request: PendingRequest | None) -> tuple[bytes, ...]:
    """The hashes of the prompt of a request."""
    arguments = () if pending_request is None else pending_request.args
    return next((x.hashes for x in arguments if isinstance(x, Forwarded)), ())
