"""Pages outside of the engine, by key: what a later engine, or another one, may find.

`QueuedStorage` is what the cache sees (its port PageStorage): workers, queues, completions. Behind it stands a
shelf that knows one page at a time: files.
"""

from serinus.pool.storage.disk import SECRET_BYTES, WRITERS, Disk, FileEntry, FileSystem
from serinus.pool.storage.file import PageFiles
from serinus.pool.storage.file_storage import FileStorage
from serinus.pool.storage.io import QueuedStorage, ShelfCounts

__all__ = [
    "SECRET_BYTES",
    "WRITERS",
    "Disk",
    "FileEntry",
    "FileStorage",
    "FileSystem",
    "PageFiles",
    "QueuedStorage",
    "ShelfCounts",
]
