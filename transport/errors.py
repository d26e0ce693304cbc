"""Why a transport call could not do its work.

    TransportError
    +-- WouldBlock      a `try_` call found no room now
    +-- Closed          we closed it
    +-- Broken          they are gone: the peer's process died or hung up
    +-- TooLarge        the payload can never fit; waiting would not help
    +-- NoSpace         shared memory is too small for what was asked at start
    +-- DeviceError     device memory: no driver, no such GPU, or the driver refused
    +-- ProtocolError   the peer said something that this version does not understand

Names say whose fault it is.
"""


class TransportError(Exception):
    """Root of the tree; never raised itself."""


class WouldBlock(TransportError):
    """There is no credit or no free slot at this moment."""


class Closed(TransportError):
    """This side closed the channel."""


class Broken(TransportError):
    """The peer's process is gone; nothing more will arrive or be released."""


class TooLarge(TransportError):
    """The payload is longer than what the connector can ever carry."""


class NoSpace(TransportError):
    """The shared-memory file system has not the room that was asked for."""


class DeviceError(TransportError):
    """There is no CUDA driver here, it does not have that GPU, or it refused a call."""


class ProtocolError(TransportError):
    """A message of another version, of an unknown kind, or not decodable."""
