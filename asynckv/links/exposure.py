"""Which addresses other machines can reach, and what is asked for there.

What is sent decides what a model says and tells what it was asked. So beyond
this host nobody is trusted for being there: both who listens and who dials must
prove themselves, and must say so explicitly if the bytes travel in the clear.
The same is asked of who dials, because it sends as much as it receives, and
because one wrong letter in a host name would hand prompts to a stranger.
"""

from __future__ import annotations

import ipaddress
import logging

from asynckv.errors import ConfigError
from asynckv.links.address import Address
from asynckv.security.keyring import Keyring

__all__ = ("check_exposure", "is_beyond_this_host")

logger = logging.getLogger(__name__)


def is_beyond_this_host(address: Address) -> bool:
    """Whether other machines can be at the other end. A name may mean any host."""
    if address.scheme in ("unix", "mem"):
        return False
    try:
        ip = ipaddress.ip_address(address.host)
    except ValueError:
        return True
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        return not ip.ipv4_mapped.is_loopback
    return not ip.is_loopback


def check_exposure(address: Address, keyring: Keyring) -> None:
    """Refuse to listen at, or to dial, what is not protected enough.

    Plaintext that was allowed is warned of, once a keyring.

    :raises ConfigError: the other end may be another machine, and there is no
        authentication, or no TLS and no ``allow_plaintext``; or certificates are
        given where they are not used, or are missing
    """
    is_tls = address.scheme == "tls"
    if is_tls != keyring.has_tls:
        raise ConfigError(
            f"{address} needs certificates" if is_tls else f"{address} is no TLS",
            hint="tls:// and tls=asynckv.TLS(...) belong together",
        )
    if is_tls or not is_beyond_this_host(address):
        return
    if not keyring.has_secret:
        raise ConfigError(
            f"{address} is beyond this host, and nobody there would have to prove "
            "who it is",
            hint="use tls://, or pass secret_file=...; on one host use unix://",
        )
    if not keyring.allow_plaintext:
        raise ConfigError(
            f"{address} is beyond this host, and the bytes would travel in the clear",
            hint="use tls://, or pass allow_plaintext=True if that network is trusted",
        )
    if not keyring.was_warned:
        keyring.was_warned = True
        logger.warning(
            "%s is beyond this host and plaintext: whoever is in between can read "
            "and change what is sent",
            address,
        )
