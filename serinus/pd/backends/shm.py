"""Pages through memory that two processes of one machine share.

The sender owns an anonymous segment (memfd) per connection; the receiver opens it through /proc/<pid>/fd/<fd>. It has
no name in any file system, so there is nothing to leak: whichever side is killed, however, the kernel frees it with the
last of the two. The segment is sealed against shrinking, so a receiver that mapped it can always read it. What Data
says of it is checked before it is believed: the process, the descriptor, that it is such a segment, sealed, and big
enough.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import sys
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from serinus.core.errors import ConfigError, TransferFailed
from serinus.pd.backends.base import Located, SpanAllocator, Staged
from serinus.pd.modes import Capabilities, Mode
from serinus.wire import Buffer

_MEMFD: Final = "serinus-kv"
_MAPPED_MAX: Final = 64
"""Segments of one peer that stay mapped: more ranks than that take turns."""
_NAME: Final = re.compile(r"([0-9]{1,10}):([0-9]{1,10}):([0-9]{1,20})")


def shm_works() -> bool:
    """True where this system has sealed anonymous segments that a process can share through /proc."""
    return sys.platform == "linux" and hasattr(os, "memfd_create") and Path("/proc/self/fd").is_dir()


def host_identity() -> str:
    """Same text in two processes exactly if they can open each other's segments: same boot, pid namespace and user.

    Empty where shm does not work.
    """
    if not shm_works():
        return ""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{Path('/proc/self/ns/pid').readlink()}/{os.geteuid()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A segment as one process has it."""

    fd: int
    inode: int
    area: NDArray[np.uint8]
    sealed: bool = True
    """Whether it can never shrink."""


class Segments:
    """The segments of this machine, as one process sees them."""

    @property
    def pid(self) -> int:
        """The number of this process."""
        return os.getpid()

    def create(self, byte_count: int) -> Opened:
        """An own segment, sealed. Raises OSError."""
        fd = os.memfd_create(_MEMFD, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, byte_count)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        area = np.frombuffer(mmap.mmap(fd, byte_count), dtype=np.uint8)
        return Opened(fd=fd, inode=os.fstat(fd).st_ino, area=area)

    def close(self, fd: int) -> None:
        """Give an own segment back; those that mapped it keep it."""
        os.close(fd)

    def open(self, pid: int, fd: int) -> Opened:
        """Map a segment of another process, read only. Raises OSError, ValueError: it is none."""
        path = Path(f"/proc/{pid}/fd/{fd}")
        if not str(path.readlink()).startswith(f"/memfd:{_MEMFD}"):
            raise ValueError(f"{path} is no segment of ours")
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(opened)
            sealed = bool(fcntl.fcntl(opened, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
            area = np.frombuffer(mmap.mmap(opened, status.st_size, prot=mmap.PROT_READ), dtype=np.uint8)
        finally:
            os.close(opened)
        return Opened(fd=fd, inode=status.st_ino, area=area, sealed=sealed)


class ShmBackend:
    """Bytes lie in a segment of the sender."""

    name = "shm"
    capabilities = Capabilities(mode=Mode.RECEIVER_CHECKED, recut=Mode.RECEIVER_CHECKED, same_host=True)

    def __init__(self, staging_bytes: int = 256 << 20, segments: Segments | None = None) -> None:
        """`staging_bytes`: of one connection, at most; memory that is never staged into is never touched. `segments`:
        None = those of the operating system.

        Raises ConfigError where shm does not work.
        """
        if not shm_works():
            raise ConfigError(f"pd: backend shm does not work on {sys.platform}, expected Linux with /proc; use tcp")
        self._staging_bytes = staging_bytes
        self._segments = Segments() if segments is None else segments

    def sender(self) -> _ShmSender:
        return _ShmSender(self._staging_bytes, self._segments)

    def receiver(self) -> _ShmReceiver:
        return _ShmReceiver(self._segments)


class _ShmSender:
    def __init__(self, staging_bytes: int, segments: Segments) -> None:
        self._spans = SpanAllocator(staging_bytes)
        self._segments = segments
        try:
            own = segments.create(staging_bytes)
        except OSError as error:
            raise TransferFailed(f"pd: no segment of {staging_bytes} bytes for a peer: {error}") from None
        self._fd, self._area = own.fd, own.area
        self._name = segment_name(segments.pid, own)

    def stage(self, byte_count: int) -> Staged | None:
        taken = self._spans.take(byte_count)
        if taken is None:
            return None
        key, start = taken
        return Staged(key=key, room=self._area[start : start + byte_count], shm_name=self._name, shm_offset=start)

    def release(self, key: int) -> None:
        self._spans.give(key)

    def close(self) -> None:
        if self._fd >= 0:
            self._segments.close(self._fd)
            self._fd = -1
        self._area = np.empty(0, dtype=np.uint8)  # unmapped with the last view of it


class _ShmReceiver:
    """Each rank of the peer stages in a segment of its own; the ones used last stay mapped."""

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._areas: OrderedDict[str, NDArray[np.uint8]] = OrderedDict()

    def fetch(self, data: Located, payload: Buffer) -> NDArray[np.uint8]:
        area = self._areas.get(data.shm_name)
        if area is None:
            area = self._areas[data.shm_name] = attach(self._segments, data.shm_name)
            if len(self._areas) > _MAPPED_MAX:
                self._areas.popitem(last=False)
        self._areas.move_to_end(data.shm_name)
        end = data.shm_offset + data.byte_count
        if end > len(area):
            raise TransferFailed(f"pd: bytes up to {end} announced, the segment has {len(area)}")
        return area[data.shm_offset : end]

    def close(self) -> None:
        self._areas.clear()


def segment_name(pid: int, own: Opened) -> str:
    """What a process calls a segment of its own before others."""
    return f"{pid}:{own.fd}:{own.inode}"


def attach(segments: Segments, name: str) -> NDArray[np.uint8]:
    """Map a sender's segment read only. Raises TransferFailed where it is not what it should be."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise TransferFailed(f"pd: segment name {name[:80]!r}, expected pid:fd:inode")
    pid, fd, inode = map(int, match.groups())
    try:
        found = segments.open(pid, fd)
    except (OSError, ValueError) as error:
        raise TransferFailed(f"pd: cannot open segment {name}: {error}") from None
    if found.inode != inode or not found.sealed:
        raise TransferFailed(f"pd: segment {name} is another one, or not sealed against shrinking")
    return found.area
