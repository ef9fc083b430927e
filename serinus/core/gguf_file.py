"""GGUF files, llama.cpp's format, as the `gguf` package reads them; and a folder of what else a checkpoint has.

A file holds config, tokenizer and weights. Rooms look for them in a directory: `gguf_folder` keeps one for each file in
the user's cache, with a link to the file, where each room writes what it makes of the metadata.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from serinus.core.errors import ConfigError
from serinus.core.user_secret import user_folders
from serinus.core.version import package_version

if TYPE_CHECKING:
    from gguf.gguf_reader import ReaderTensor

GGUF_LINK: Final = "model.gguf"
"""What the file is called in its folder."""


class GgufFile:
    """Metadata and tensors of one file, mapped into memory."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError: it is no GGUF file of this byte order, cut short, or one of several.

        Cost: a second or two where a vocabulary has 150,000 tokens; tensors are not read.
        """
        from gguf import GGUFReader

        self.path = path
        try:
            reader = GGUFReader(path, "c")  # private: tensors that torch may see as its own, the file is not changed
        except (ValueError, IndexError, KeyError, OverflowError, OSError) as error:
            raise ConfigError(f"models: {path} cannot be read ({error}), expected a complete GGUF file") from None
        self._fields = reader.fields
        self.tensors: dict[str, ReaderTensor] = {tensor.name: tensor for tensor in reader.tensors}
        """By the names that llama.cpp gives them; their `data` has rows of blocks as they are stored."""
        if reader.byte_order == "S" or self.get("split.count", 1) > 1:
            what = "of the other byte order" if reader.byte_order == "S" else "one of several (split.count)"
            raise ConfigError(f"models: {path} is {what}, expected one file of little-endian numbers with all tensors")

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the metadata: number, text, truth value, or a list of them."""
        field = self._fields.get(key)
        return default if field is None else field.contents()

    @property
    def architecture(self) -> str:
        """As llama.cpp calls it. Raises ConfigError: the file does not say."""
        found = self.get("general.architecture")
        if not isinstance(found, str):
            raise ConfigError(f"models: {self.path} has no general.architecture, expected a GGUF file of a model")
        return found

    @property
    def type_counts(self) -> dict[str, int]:
        """Weights (numbers, not tensors) by the name of their type, most first."""
        counts: dict[str, int] = {}
        for tensor in self.tensors.values():
            name = tensor.tensor_type.name
            counts[name] = counts.get(name, 0) + int(tensor.n_elements)
        return dict(sorted(counts.items(), key=lambda pair: -pair[1]))


def is_gguf(path: str | Path) -> bool:
    """Whether a path is that of a GGUF file, by its name."""
    return Path(path).suffix == ".gguf" and Path(path).is_file()


def gguf_folder(file: Path) -> Path:
    """The folder that stands for a file: of this user alone, with a link to it. A file that was changed has another.

    Raises ConfigError: the user has no place where a folder can be kept.
    """
    about = file.stat()
    said = f"{file.resolve()}|{about.st_size}|{about.st_mtime_ns}|{package_version()}"
    name = f"{file.stem}-{blake2b(said.encode(), digest_size=8).hexdigest()}"
    for place in user_folders():
        with contextlib.suppress(OSError):
            mine = place / f"serinus-{os.getuid()}-gguf"
            mine.mkdir(mode=0o700, parents=True, exist_ok=True)
            if mine.is_symlink() or mine.stat().st_uid != os.getuid() or mine.stat().st_mode & 0o022:
                continue  # another user could have written there
            folder = mine / name
            folder.mkdir(mode=0o700, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                (folder / GGUF_LINK).symlink_to(file.resolve())
            return folder
    raise ConfigError(f"models: no folder for {file} can be kept in {', '.join(map(str, user_folders()))}")


def write_once(file: Path, text: str) -> None:
    """Write a file whole: of processes that do so at one time, each has written the same."""
    handle, new = tempfile.mkstemp(dir=file.parent, prefix=file.name)
    with os.fdopen(handle, "w", encoding="utf-8") as opened:
        opened.write(text)
    os.replace(new, file)
