"""python .ci/waiting.py TEXT COMMAND…: run a command that says little for long.

On a terminal it shows TEXT, the seconds and what the command printed last; elsewhere one line. If the command fails, all
that it printed follows, and its exit code is ours.
"""

import itertools
import shutil
import subprocess
import sys
import threading
import time


def main() -> int:
    text, *command = sys.argv[1:]
    lines: list[str] = []
    start = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    reader = threading.Thread(target=lambda: lines.extend(process.stdout or ()))
    reader.start()
    if sys.stderr.isatty():
        for sign in itertools.cycle("|/-\\"):
            reader.join(0.2)
            if not reader.is_alive():
                break
            shown = f"{sign} {text}  {time.monotonic() - start:.0f} s  {lines[-1].strip() if lines else ''}"
            sys.stderr.write(f"\r\x1b[K{shown[: shutil.get_terminal_size().columns - 1]}")
        sys.stderr.write("\r\x1b[K")
    code = process.wait()
    reader.join()
    print(f"{text}: {'failed' if code else 'done'} after {time.monotonic() - start:.0f} s", file=sys.stderr)
    if code:
        sys.stderr.writelines(lines)
    return code


if __name__ == "__main__":
    sys.exit(main())
