"""What the requests of one episode hold now; `request_memory` counts into it, and the running episode keeps it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class EpisodeMemory:
    """What the requests of one episode hold now."""

    in_flight_bytes: int = 0
    """Bytes of bodies that are being read or answered."""
    in_flight_requests: int = 0
