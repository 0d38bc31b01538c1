"""The command onehop, as the package carries it: `python -m onehop perf`."""

import os
import sys
from pathlib import Path
from typing import NoReturn


def main() -> NoReturn:
    """Becomes the command. Exit code 3 where the package was built without it."""
    command = Path(__file__).with_name("bin") / "onehop"
    if not command.exists():
        print(f"onehop: this package has no command: {command} is missing", file=sys.stderr)
        sys.exit(3)
    os.execv(command, ["onehop", *sys.argv[1:]])


if __name__ == "__main__":
    main()
