"""Host names that requests may have, so that a page of another site cannot reach a local server by its name.

A name that an attacker controls may resolve to this machine (DNS rebinding). A browser then takes the server
for a part of the attacker's site. The header Host still says the attacker's name. Names without a dot are
local: public name servers resolve none of them.
"""

import ipaddress
import re
from collections.abc import Sequence
from typing import NamedTuple

HOST = re.compile(r"(\[(?P<address>[0-9A-Fa-f:.]+)\]|(?P<name>[\w.-]+))(:[0-9]*)?")


class HostNames(NamedTuple):
    """This machine's names, if `loopback`, and others."""

    loopback: bool
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " or ".join([*(["a name of this machine"] if self.loopback else []), *self.names])

    def accept(self, host: str) -> bool:
        """Whether a header Host, with or without a port, is one of the names; browsers always send one.

        >>> hosts = HostNames(True, ("example.org",))
        >>> [hosts.accept(host) for host in ("localhost:8000", "127.0.0.9", "[::1]:80", "Example.org", "")]
        [True, True, True, True, True]
        >>> [hosts.accept(host) for host in ("evil.com", "127.0.0.1.evil.com", "[::1].evil.com", ":evil.com")]
        [False, False, False, False]
        """
        if not host:
            return True
        if (parts := HOST.fullmatch(host)) is None:
            return False
        name = (parts["address"] or parts["name"]).lower().rstrip(".")
        return name in self.names or (self.loopback and is_local(name))


def accepted_hosts(listens_on: str, allowed: Sequence[str]) -> HostNames | None:
    """The names that requests to a server may have; None where any will do.

    Args:
        listens_on: the address that the server listens on.
        allowed: names stated by its operator; "*" allows any. Without, only a loopback address is checked.
    """
    loopback = is_loopback(listens_on)
    if "*" in allowed or not (loopback or allowed):
        return None
    return HostNames(loopback, tuple(name.lower() for name in allowed))


def is_local(name: str) -> bool:
    """Whether a name is this machine's own, or has no dot."""
    return is_loopback(name) or not {".", ":"} & set(name)


def is_loopback(name: str) -> bool:
    """Whether a name or address is this machine's own."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
