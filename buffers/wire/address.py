"""Addresses of listeners, and the kind of way that leads there. No sockets."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from enum import StrEnum

from buffers.errors import UnderstudyError


class WireError(UnderstudyError):
    """The other side is not who it should be, or sent an invalid message. A new connection may do better."""


class WireLost(WireError):
    """The connection ended, and it is not known whether what was sent last arrived. The same may be sent over a new one."""


class OtherVersion(WireError):
    """The other side runs another version of this project: no new connection does better."""


class Way(StrEnum):
    """How messages are kept from others. On each way both sides prove that they know the run's secret."""

    LOCAL = "local"
    """A Unix socket in a folder that no other user can enter."""
    ENCRYPTED = "encrypted"
    """TCP, encrypted and authenticated by CURVE (curvezmq.org, RFC 26): 93 MB/s on a slow core."""
    SIGNED = "signed"
    """TCP in the clear, each message with an HMAC-SHA256: for a network where nobody listens and nobody else is."""


@dataclass(frozen=True, slots=True)
class WireAddress:
    """A listener's address. Its text `WAY:PLACE` travels by what starts the listener's process: Ray, or a pipe."""

    way: Way
    place: str
    """A path for LOCAL, else HOST:PORT."""

    def __str__(self) -> str:
        return f"{self.way}:{self.place}"

    @property
    def endpoint(self) -> str:
        """The address as ZeroMQ has it."""
        return f"{'ipc' if self.way is Way.LOCAL else 'tcp'}://{self.place}"

    @classmethod
    def parse(cls, text: str) -> WireAddress:
        """Raises WireError for what is no address."""
        way, _, place = text.partition(":")
        if way not in set(Way) or not place:
            raise WireError(
                f"a listener's address must be one of {', '.join(Way)}, then : and its place, got {text!r:.100}"
            )
        return cls(Way(way), place)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens there."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def way_to(host: str, *, trusted: bool = False) -> Way:
    """How to reach what listens on this address. `trusted`: nobody else is on the network."""
    if is_loopback(host):
        return Way.LOCAL
    return Way.SIGNED if trusted else Way.ENCRYPTED
