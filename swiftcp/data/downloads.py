"""Media from the web, where a run allows it: no address of this machine or its link, no redirection, no more than so many bytes."""

from __future__ import annotations

import ipaddress
import socket
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from swiftcp.errors import DataError

MAX_BYTES = 256 * 1024 * 1024


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    """A redirection may lead anywhere, to addresses that were refused included."""

    def redirect_request(self, *_: Any) -> None:
        return None


def download(url: str, timeout: float) -> bytes:
    """What lies at a URL.

    Raises:
        DataError: the address is refused, redirects, cannot be reached within `timeout` seconds, or holds too much.
    """
    try:
        check_host(urlsplit(url).hostname)
        with urllib.request.build_opener(_NoRedirection).open(url, timeout=timeout) as response:
            contents = response.read(MAX_BYTES + 1)
    except urllib.error.HTTPError as error:
        where = f", to {error.headers.get('location')}: name that address" if 300 <= error.code < 400 else ""
        raise DataError(f"cannot be fetched: {error}{where}") from None
    except (OSError, ValueError) as error:
        raise DataError(f"cannot be fetched: {error}") from None
    if len(contents) > MAX_BYTES:
        raise DataError(f"is larger than {MAX_BYTES} bytes: fetch the file beforehand")
    return contents


def check_host(host: str | None) -> None:
    """Raises: DataError: the host is this machine, or one that only its link reaches, such as a cloud's metadata service."""
    if not host:
        raise DataError("names no host: write https://host/path")
    for *_, address in socket.getaddrinfo(host, None):
        found = ipaddress.ip_address(str(address[0]).partition("%")[0])
        found = getattr(found, "ipv4_mapped", None) or found
        if found.is_loopback or found.is_link_local or found.is_unspecified or found.is_multicast:
            raise DataError(f"leads to {found}, an address of this machine or its link, which is refused: use a path")
