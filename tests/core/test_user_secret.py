"""user_secret: one per user and machine, without being told; never one that another user could know."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from serinus.core.user_secret import user_secret


def test_all_processes_of_a_user_get_the_same_one_also_those_that_start_together(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: user_secret((tmp_path / "a",)), range(32)))
    (secret,) = found
    assert len(secret) == 32
    (file,) = (tmp_path / "a").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert user_secret((tmp_path / "b",)) != secret


@pytest.mark.parametrize("how", ["others may read it", "a link", "too short", "a folder"])
def test_a_file_that_another_user_could_know_is_not_used(tmp_path: Path, how: str) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    file = first / f"serinus-{os.getuid()}.secret"
    if how == "a folder":
        file.mkdir()
    elif how == "a link":
        (tmp_path / "elsewhere").write_text("x" * 32)
        (tmp_path / "elsewhere").chmod(0o600)
        file.symlink_to(tmp_path / "elsewhere")
    else:
        file.write_text("x" * (32 if how == "others may read it" else 10))
        file.chmod(0o644 if how == "others may read it" else 0o600)
    assert user_secret((first,)) == ""
    secret = user_secret((first, second))
    assert len(secret) == 32
    assert secret == user_secret((second,))
