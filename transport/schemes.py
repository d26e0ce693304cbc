"""Which connector serves which scheme; each is imported when it is first wanted."""

from __future__ import annotations

from pathlib import Path

from transport.connector import Connector, ConnectorOptions

SCHEMES = ("shm", "tcp", "memory")


def make_connector(scheme: str, name: str, directory: Path, options: ConnectorOptions, *, token: str = "") -> Connector:
    """The connector of `scheme` for the process `name`; not opened yet.

    Args:
        scheme: one of SCHEMES.
        name: how peers know this process.
        directory: a 0700 folder for local sockets.
        options: sizes and bounds.
        token: the run's secret; asked of whoever connects over TCP.
    """
    match scheme:
        case "shm":
            from transport.shm import ShmConnector

            return ShmConnector(name, directory, options)
        case "tcp":
            from transport.tcp import TcpConnector

            return TcpConnector(name, options, token=token)
        case "memory":
            from transport.memory import MemoryConnector

            return MemoryConnector(name, options)
    raise ValueError(f"scheme: got {scheme!r}, expected one of {', '.join(SCHEMES)}")
