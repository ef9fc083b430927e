"""A private folder goes with its process, also where that was killed; those of living processes stay."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from serinus.core.private_folder import PrivateFolder

SCRIPT = """
import sys
from pathlib import Path
from serinus.core.private_folder import PrivateFolder

folder = PrivateFolder(Path(sys.argv[1]))
print(folder.path, flush=True)
sys.stdin.read()
folder.close()
"""


def other_process(place: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that has a folder there until its input ends, and the folder."""
    words = [sys.executable, "-c", SCRIPT, str(place)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_folder_is_for_its_user_alone_and_goes_when_it_is_left(tmp_path: Path) -> None:
    with PrivateFolder(tmp_path) as path:
        (path / "inside").mkdir()
        assert path.stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_killed_process_is_removed_by_the_next_and_no_other(tmp_path: Path) -> None:
    living, its_folder = other_process(tmp_path)
    killed, left = other_process(tmp_path)
    killed.kill()
    killed.communicate()
    (left / "config.json").write_text("{}")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "owner").touch()
    link, fresh = tmp_path / "serinus-link", tmp_path / "serinus-fresh"
    link.symlink_to(outside)
    fresh.mkdir()
    with PrivateFolder(tmp_path) as path:
        assert {*tmp_path.iterdir()} == {its_folder, outside, link, fresh, path}
        assert (outside / "owner").exists()
    living.communicate("")
    assert living.returncode == 0
    assert not its_folder.exists()


def test_many_that_start_and_end_at_once_leave_each_other_alone(tmp_path: Path) -> None:
    rows = [other_process(tmp_path) for _ in range(4)]
    assert all((folder / "owner").exists() for _, folder in rows)
    rows[0][0].kill()
    for process, _ in rows:
        process.communicate("")
    assert [process.returncode for process, _ in rows] == [-9, 0, 0, 0]
    PrivateFolder(tmp_path).close()
    assert list(tmp_path.iterdir()) == []
