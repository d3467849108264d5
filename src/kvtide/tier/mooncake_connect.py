"""How kvtide joins a Mooncake store: its package must load, and the master must answer."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

from kvtide.errors import TierRetry, UsageError
from kvtide.tier.mooncake_client import StoreClient
from kvtide.tier.mooncake_settings import MooncakeSettings

_CONNECT_S = 2.0
# Its messages of every start would stand between kvtide's own lines.
_LOG_LEVEL = ("MC_LOG_LEVEL", "ERROR")
# Each try to connect takes 4 seconds, and by default there are 20.
_SETUP_TRIES = ("MC_STORE_CLIENT_SETUP_RETRIES", "2")
_PACKAGES = "libibverbs1 libnl-3-200 libnl-route-3-200"


def check_mooncake(settings: MooncakeSettings) -> None:
    """Raises UsageError if mooncake can't be loaded, or nobody is at the master's address.

    It takes less time than to join the store, and less still than to load a model.
    """
    _load()
    try:
        _address_towards(settings.master)
    except TierRetry as error:
        raise no_master(error) from error


def no_master(error: TierRetry) -> UsageError:
    """The error for somebody who starts a program before the store."""
    return UsageError(f"{error}; start the master first, see docs/mooncake.md")


def connect(settings: MooncakeSettings) -> Callable[[], StoreClient]:
    """A function that opens a client of the store.

    Raises UsageError if mooncake can't be loaded. The function raises TierRetry if the master
    doesn't answer.
    """
    make: Callable[[], Any] = _load()

    def open_client() -> StoreClient:
        address = _address_towards(settings.master)
        os.environ.setdefault(*_SETUP_TRIES)
        client = make()
        code = client.setup(
            settings.host or address,
            settings.metadata,
            0,
            0,
            settings.protocol,
            settings.devices,
            settings.master,
        )
        if code:
            raise TierRetry(
                f"mooncake tier: cannot join the store of {settings.master} (code {code})"
            )
        store: StoreClient = client
        return store

    return open_client


def _load() -> Any:
    """The class of clients. Raises UsageError, which says what is missing."""
    os.environ.setdefault(*_LOG_LEVEL)
    try:
        from mooncake.store import MooncakeDistributedStore
    except ModuleNotFoundError as error:
        raise UsageError(
            f"mooncake tier: {error}; install it: pip install 'kvtide[mooncake]'"
        ) from error
    except ImportError as error:
        raise UsageError(
            f"mooncake tier: mooncake can't be loaded: {error}. It needs libraries that its "
            f"package doesn't have; on Debian or Ubuntu: apt install {_PACKAGES}"
        ) from error
    return MooncakeDistributedStore


def _address_towards(master: str) -> str:
    """This machine's address on the way to the master. Raises TierRetry if nobody is there.

    Without this a client would try for minutes to reach a master that isn't there.
    """
    host, _, port = master.rpartition(":")
    if not port.isdecimal() or "/" in host:
        return ""  # masters that are found through etcd
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S) as connection:
            return str(connection.getsockname()[0])
    except OSError as error:
        raise TierRetry(f"mooncake tier: no master at {master}: {error}") from error
