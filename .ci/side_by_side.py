"""python .ci/side_by_side.py COMMAND COMMAND…: run commands at the same time.

The output of the last one is shown as it comes, that of the others when they have ended. Exits with 1 if any failed.
"""

import contextlib
import shlex
import subprocess
import sys
import tempfile


def main() -> int:
    *others, last = map(shlex.split, sys.argv[1:])
    with contextlib.ExitStack() as files:
        started = []
        for command in others:
            output = files.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace"))
            started.append((subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT), output))
        try:
            failed = subprocess.run(last).returncode != 0
        except KeyboardInterrupt:  # the terminal interrupts the others as well
            failed = True
        for process, output in started:
            failed |= process.wait() != 0
            output.seek(0)
            print(f"\n{shlex.join(process.args)}\n{output.read()}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
