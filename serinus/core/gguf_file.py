"""GGUF files, llama.cpp's format, as the `gguf` package reads them; and a folder of what else a checkpoint has.

A model may be cut into files NAME-00001-of-0000N.gguf: the first one stands for all, and has all metadata. A file
holds config, tokenizer and weights. Rooms look for them in a directory: `gguf_folder` keeps one for each file in the
user's cache, with a link to the file, where each room writes what it makes of the metadata.
"""

from __future__ import annotations

import contextlib
import os
import re
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
_PART: Final = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


class GgufFile:
    """Metadata and tensors of one file, or of all parts of which it is the first, mapped into memory."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError: it is no GGUF file of this byte order, or cut short, or its parts are not all there.

        Cost: a second or two where a vocabulary has 150,000 tokens; tensors are not read.
        """
        self.path = path
        self._fields: dict[str, Any] = {}
        self.tensors: dict[str, ReaderTensor] = {}
        """By the names that llama.cpp gives them; their `data` has rows of blocks as they are stored."""
        paths = parts_of(path)
        for number, part in enumerate(paths):
            self._read(part, number, len(paths))
        count = self.get("split.tensors.count", len(self.tensors))
        if len(self.tensors) != count:
            raise ConfigError(f"models: {path} and its parts have {len(self.tensors)} tensors, expected {count}")

    def _read(self, path: Path, number: int, count: int) -> None:
        from gguf import GGUFReader

        try:
            reader = GGUFReader(path, "c")  # private: tensors that torch may see as its own, the file is not changed
        except (ValueError, IndexError, KeyError, OverflowError, OSError) as error:
            raise ConfigError(f"models: {path} cannot be read ({error}), expected a complete GGUF file") from None
        if reader.byte_order == "S":
            raise ConfigError(f"models: {path} is of the other byte order, expected a file of little-endian numbers")
        said = [field.contents() if field else 0 for field in map(reader.fields.get, ("split.no", "split.count"))]
        if (said[0], max(said[1], 1)) != (number, count):
            raise ConfigError(
                f"models: {path} says it is part {said[0] + 1} of {said[1]}, expected {number + 1} of {count}"
            )
        self._fields = self._fields or reader.fields
        self.tensors |= {tensor.name: tensor for tensor in reader.tensors}

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


def parts_of(path: Path) -> list[Path]:
    """The file and the parts behind it, by its name (of a link in a `gguf_folder`, by that of the file). Raises
    ConfigError: it is not the first, or others are missing."""
    file = path.parent / path.readlink() if path.name == GGUF_LINK and path.is_symlink() else path
    found = _PART.fullmatch(file.name)
    if found is None:
        return [file]
    name, number, count = found[1], int(found[2]), int(found[3])
    paths = [file.with_name(f"{name}-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count)]
    if number != 1:
        raise ConfigError(f"models: {file} is part {number} of {count}, expected the first, {paths[0].name}")
    missing = [each.name for each in paths if not each.is_file()]
    if missing:
        raise ConfigError(f"models: {file} is part 1 of {count}, expected {', '.join(missing)} beside it")
    return paths


def gguf_folder(file: Path) -> Path:
    """The folder that stands for a file: of this user alone, with a link to it. A file that was changed has another.

    Raises ConfigError: its parts are not all there, or the user has no place where a folder can be kept.
    """
    file = Path(os.path.abspath(file))  # not resolved: a link of a hub's cache has the name, which parts are known by
    about = [(each.stat().st_size, each.stat().st_mtime_ns) for each in parts_of(file)]
    said = f"{file.resolve()}|{about}|{package_version()}"
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
                (folder / GGUF_LINK).symlink_to(file)
            return folder
    raise ConfigError(f"models: no folder for {file} can be kept in {', '.join(map(str, user_folders()))}")
