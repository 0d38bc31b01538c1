"""`python -m onehop`: the command `onehop` that was installed with this package."""

import importlib.metadata
import os
import shutil
import sys


def command() -> str | None:
    """Where the command is: as the package was installed, else in PATH."""
    try:
        files = importlib.metadata.files("onehop") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    installed = [str(file.locate()) for file in files if file.name == "onehop" and file.parent.name == "bin"]
    return next(filter(os.path.exists, installed), shutil.which("onehop"))


def main() -> None:
    path = command()
    if not path:
        sys.exit("python -m onehop: the command onehop was not installed with this package, and is not in PATH")
    os.execv(path, ["onehop", *sys.argv[1:]])


if __name__ == "__main__":
    main()
