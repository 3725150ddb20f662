"""What every path but the gRPC stream looks like to the drivers."""

from __future__ import annotations

from typing import Protocol

from kvstore.errors import UnavailableError
from kvstore.messages import BlockState, CommitState
from kvstore_client.flows.steps import Fetch, Send


class TransferRefusedError(UnavailableError):
    """The daemon refuses this one transfer, such as for a ticket that is too old; the path is as good as before."""


class Mover(Protocol):
    """Moves the bytes of blocks; blocks its thread until they are there, and lets go of the interpreter meanwhile.

    Many threads may use a mover. What goes wrong with the path as a whole raises `UnavailableError`,
    `DeadlineExceededError` or `ProtocolError`; what goes wrong with one block is in the outcome.
    """

    def fetch(self, step: Fetch) -> list[BlockState]:
        """See `Fetch`."""

    def send(self, step: Send) -> list[CommitState] | None:
        """See `Send`."""

    def close(self) -> None:
        """Ends transfers under way in other threads; later ones raise `UnavailableError`."""
