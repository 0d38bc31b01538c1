"""Files that the user of a command names: written whole or not at all, and never through a link.

As src/cli/shared/output.c does it. A regular file is written under a random name in the same directory and renamed. A FIFO
with a reader, a character device and an open descriptor (/dev/stdout, /dev/fd/N) are opened before the work and written
into. All else is refused before the work. Imports nothing of the package: bench/ loads this file by its path.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import re
import secrets
import stat

_FLAGS = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC


class Output:
    """A type for argparse: made before the work, it refuses what cannot be written. `write` once, after the work."""

    def __init__(self, path: str) -> None:
        self.path = os.fspath(path)
        self._directory, self._name = os.path.split(self.path)
        self._into: int | None = None
        try:
            self._open()
        except OSError as error:
            raise argparse.ArgumentTypeError(f"'{path}' cannot be written: {error.strerror}") from error

    def __str__(self) -> str:
        return self.path

    def write(self, content: str | bytes) -> None:
        data = content.encode() if isinstance(content, str) else content
        if self._into is not None:
            _write_all(self._into, data)
            return
        mode = self._mode()
        beside, file = self._create()
        try:
            if mode is not None:
                os.fchmod(file, mode)
            _write_all(file, data)
            os.replace(beside, self.path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(beside)
            raise

    def _open(self) -> None:
        own = re.fullmatch(r"/dev/(stdout|stderr)|(?:/dev|/proc/self)/fd/([0-9]{1,6})", self.path)
        if own:
            number = int(own[2]) if own[2] else ("", "stdout", "stderr").index(own[1])
            if fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
                raise OSError(0, "it is not open for writing")
            self._into = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3)
        elif self._name in ("", ".", ".."):
            raise OSError(0, "it names no file")
        else:
            self._open_there()

    def _open_there(self) -> None:
        try:
            there = os.lstat(self.path)
        except FileNotFoundError:
            there = None
        if there is None or stat.S_ISREG(there.st_mode):
            if there is not None:
                os.close(os.open(self.path, _FLAGS | os.O_NONBLOCK))  # may this user write to it?
            beside, file = self._create()  # only an attempt tells, for root too
            os.close(file)
            os.unlink(beside)
        elif stat.S_ISFIFO(there.st_mode) or stat.S_ISCHR(there.st_mode):
            self._into = os.open(self.path, _FLAGS | os.O_NOCTTY | os.O_NONBLOCK)
            if not os.path.samestat(there, os.fstat(self._into)):
                raise OSError(0, "it changes")
            os.set_blocking(self._into, True)
        elif stat.S_ISLNK(there.st_mode):
            raise OSError(0, "it is a symbolic link; name the file itself")
        else:
            raise OSError(0, "it is neither a file, a FIFO nor a character device")

    def _create(self) -> tuple[str, int]:
        beside = os.path.join(self._directory, f".onehop-{secrets.token_hex(8)}")
        return beside, os.open(beside, _FLAGS | os.O_CREAT | os.O_EXCL, 0o666)

    def _mode(self) -> int | None:
        """Of a file of this user, which is replaced. The work took its time: it may be something else now."""
        try:
            there = os.lstat(self.path)
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(there.st_mode):
            raise OSError(0, "no longer a regular file", self.path)
        return there.st_mode & 0o777 if there.st_uid == os.geteuid() else None


def _write_all(file: int, data: bytes) -> None:
    with open(file, "wb") as stream:  # closing tells of an error too
        stream.write(data)
