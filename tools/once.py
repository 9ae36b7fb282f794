"""Run a command unless it has succeeded before: `python tools/once.py FOLDER COMMAND...`.

A stamp in FOLDER, named by a hash of the command, says that it has.  The status is the command's.
"""

import hashlib
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path


def run_once(folder: Path, command: list[str]) -> int:
    """Run `command` if `folder` has no stamp of it; returns its status, 0 if it has one."""
    shown = shlex.join(command)
    stamp = folder / hashlib.sha256(shown.encode()).hexdigest()[:12]
    if stamp.is_file():
        print(f"done before: {shown}  (to do it again: rm {stamp})")
        return 0
    print(shown, flush=True)
    status = None
    with subprocess.Popen(command) as process:
        while status is None:
            # An interruption reaches the command too, which ends by itself.
            with suppress(KeyboardInterrupt):
                status = process.wait()
    if status == 0:
        folder.mkdir(parents=True, exist_ok=True)
        stamp.write_text(f"{shown}\n")
    if status < 0:
        # As shells tell a signal.
        return 128 - status
    return status


if __name__ == "__main__":
    sys.exit(run_once(Path(sys.argv[1]), sys.argv[2:]))
