"""Disks of 16 MB that can be filled: mounted ones, and files that fail."""

import builtins
import errno
import io
import os
import subprocess
from pathlib import Path

import pytest

MOST = 2**24
PAGE = 4096


class MountedDisk:
    """A file system of its own, with a ballast that fills it."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir(exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={MOST}", "tmpfs", str(folder)]
        subprocess.run(command, check=True, capture_output=True)

    def leave(self, size):
        ballast = os.statvfs(self.folder).f_bavail * PAGE - size
        with (self.folder / "ballast").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, ballast)

    def free(self):
        (self.folder / "ballast").unlink()

    def close(self):
        subprocess.run(["umount", str(self.folder)], check=True)


class DiskOfFiles:
    """A folder whose files fail to be written when they are too large together."""

    def __init__(self, folder):
        self.folder = folder
        self.limit = MOST
        self.patch = pytest.MonkeyPatch()
        folder.mkdir(exist_ok=True)
        disk = self

        class File(io.FileIO):
            def write(self, content):
                left = disk.limit - disk.used()
                if len(content) <= left:
                    return super().write(content)
                super().write(bytes(content[: max(0, left)]))
                raise OSError(errno.ENOSPC, "No space left on device")

            def fileno(self):
                raise io.UnsupportedOperation("Pillow would write by itself")

        usual = open

        def opened(file, mode="r", *args, **options):
            is_ours = isinstance(file, str | Path) and Path(file).is_relative_to(folder)
            if not is_ours or not set(mode) & set("wax"):
                return usual(file, mode, *args, **options)
            buffered = io.BufferedWriter(File(file, mode.translate({ord(c): "" for c in "bt+"})))
            if "b" in mode:
                return buffered
            return io.TextIOWrapper(buffered, "utf-8", newline=options.get("newline"))

        self.patch.setattr(io, "open", opened)
        self.patch.setattr(builtins, "open", opened)

    def used(self):
        sizes = [file.stat().st_size for file in self.folder.rglob("*") if file.is_file()]
        return sum(-size // PAGE * -PAGE for size in sizes)

    def leave(self, size):
        self.limit = self.used() + size

    def free(self):
        self.limit = MOST

    def close(self):
        self.patch.undo()


def mounted_if_possible(folder):
    try:
        return MountedDisk(folder)
    except (OSError, subprocess.CalledProcessError):
        return DiskOfFiles(folder)
