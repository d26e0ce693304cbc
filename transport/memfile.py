"""A nameless file of shared memory: made, sized and touched by its writer, handed to readers by descriptor, read-only.

Knows files and mappings; knows nothing of slots.

Rules
- The pages are allocated before they are mapped: a full file system is `NoSpace` here, never SIGBUS later.
- The file has no name, so nothing is left when the last process that has it ends, however it ends.
- Readers get a read-only descriptor; a memfd is sealed as well, so nobody can shrink it under a mapping.
- A mapping lives as long as anything that views it; it is never unmapped by hand.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os

import numpy as np

from transport.errors import NoSpace, ProtocolError

SHM_DIR = "/dev/shm"
_ROOMY = 2  # a file system that could not hold what so many processes may want is not meant for it (containers often get 64 MB): memfd
_F_SEAL_FUTURE_WRITE = 0x10  # fcntl has it from Python 3.13 on
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL


class Mapping(mmap.mmap):
    """Memory of a file. `pinned` is for what makes it known to a device, and dies with the mapping, just before it is unmapped."""

    pinned: object = None


class MemFile:
    """The writer's end: `memory` is writable, `fd` is what readers are given."""

    def __init__(self, nbytes: int, budget_bytes: int = 0) -> None:
        """Allocate and map `nbytes`. Blocks for about 0.6 ms per MiB: call it on a thread. Raises NoSpace.

        `budget_bytes`: what this process may come to want in all; decides where the file is made.
        """
        writable, sealed = _open(max(nbytes, budget_bytes))
        try:
            _allocate(writable, nbytes, where="memory" if sealed else SHM_DIR)
            self.memory = memoryview(Mapping(writable, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))
            if sealed:
                fcntl.fcntl(writable, fcntl.F_ADD_SEALS, _SEALS)
            self.fd = os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(writable)
        self.nbytes = nbytes

    def close(self) -> None:
        """Give the descriptor back; the memory goes when its last view does. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
        self.memory = memoryview(b"")


def attach(fd: int, nbytes: int) -> memoryview:
    """The reader's end: all of the file, read-only; `fd` stays the caller's. Raises ProtocolError when the file is shorter than was said."""
    size = os.fstat(fd).st_size
    if size < nbytes:
        raise ProtocolError(f"shared memory of {size} bytes, and its writer said {nbytes}")
    return memoryview(mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ))


def mapping_of(array: np.ndarray) -> Mapping | None:
    """The writer's mapping in which `array` lies; None when it is private memory."""
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    mapping = base.obj if isinstance(base, memoryview) else None
    return mapping if isinstance(mapping, Mapping) else None


def _open(budget_bytes: int) -> tuple[int, bool]:
    """A writable nameless file, and whether it is a memfd."""
    try:
        space = os.statvfs(SHM_DIR)
        if space.f_blocks == 0 or space.f_blocks * space.f_frsize >= _ROOMY * budget_bytes:  # 0: a tmpfs without limit
            return os.open(SHM_DIR, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o400), False
    except OSError as error:
        # No such directory, not ours to write in, or a file system without O_TMPFILE.
        if error.errno not in (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    return os.memfd_create("streamrt", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), True


def _allocate(fd: int, nbytes: int, where: str) -> None:
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG):
            raise
        raise NoSpace(_no_space(fd, nbytes, where)) from error


def _no_space(fd: int, nbytes: int, where: str) -> str:
    message = f"{where}: {nbytes} bytes of shared memory asked for"
    if where == SHM_DIR:
        os.ftruncate(fd, 0)  # what the failed call did allocate would count as missing
        space = os.statvfs(SHM_DIR)
        free = space.f_bavail * space.f_frsize
        message += f", {free} free of {space.f_blocks * space.f_frsize}: {max(0, nbytes - free)} missing"
    return f"{message}\nhint: free or enlarge {where}, or lower arena_bytes"
