"""The storage that the cache sees, of pages in files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from serinus.core.clock import Clock
from serinus.core.parts import Part
from serinus.pool.host import HostPool
from serinus.pool.storage.disk import FileSystem
from serinus.pool.storage.file import PageFiles
from serinus.pool.storage.io import QueuedStorage
from serinus.pool.workers import Workers


class FileStorage(QueuedStorage):
    """A PageStorage over a folder."""

    def __init__(
        self,
        folder: str | Path,
        *,
        host: Mapping[Part, HostPool],
        namespace: str,
        byte_max: int | None,
        clock: Clock,
        disk: FileSystem | None = None,
        workers: Workers | None = None,
    ) -> None:
        """See PageFiles and QueuedStorage. Raises ConfigError: the folder cannot be used."""
        page_bytes = {part: pool.page_bytes for part, pool in host.items()}
        files = PageFiles(folder, namespace=namespace, page_bytes=page_bytes, byte_max=byte_max, clock=clock, disk=disk)
        super().__init__(files, host=host, clock=clock, workers=workers)
