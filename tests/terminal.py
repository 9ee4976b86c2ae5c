"""Run a command on a terminal of a given width, and draw what stays on its screen.

python tests/terminal.py        # docs/img/terminal.svg: the demo on 80 columns
"""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import tempfile
import termios
from html import escape
from pathlib import Path

from conftest import LIMIT

ROOT = Path(__file__).resolve().parents[1]
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_a_terminal(command, columns, folder, env):
    """Run a command; return its exit status and its output."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    process = subprocess.Popen(command, cwd=folder, env=env | {"TERM": "xterm"}, **streams)
    os.close(theirs)
    output = b""
    while select.select([ours], [], [], 120)[0]:
        try:
            output += os.read(ours, 2**16)
        except OSError:  # the last process on it has ended
            break
    os.close(ours)
    return process.wait(timeout=LIMIT), output.decode()


def screen(output):
    """Return the lines that stay: what follows a carriage return is written over what was there."""
    lines = []
    for line in ESCAPE.sub("", output).split("\n"):
        shown = ""
        for part in line.split("\r"):
            shown = part + shown[len(part) :]
        lines.append(shown.rstrip())
    return lines


def svg(title, lines):
    """Return a picture of a terminal."""
    height = 18 * len(lines) + 62
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 700 {height}" width="700">',
        f"<title>{escape(title)}</title>",
        f'<rect width="700" height="{height}" rx="8" fill="#1e2125"/>',
        '<g font-family="ui-monospace, Menlo, Consolas, monospace" font-size="14" fill="#e6e6e3">',
        f'<text x="14" y="28" fill="#5fcf92">$ {escape(title)}</text>',
    ]
    for number, line in enumerate(lines):
        at = f'x="14" y="{18 * number + 52}" textLength="{8.4 * len(line):.1f}"'
        parts.append(f'<text {at} xml:space="preserve">{escape(line)}</text>')
    return "\n".join([*parts, "</g>", "</svg>", ""])


def main():
    with tempfile.TemporaryDirectory() as folder:
        command = [ROOT / "run_distributed.sh", "2"]
        status, output = on_a_terminal(command, 80, folder, dict(os.environ))
    assert status == 0, output
    lines = [line for line in screen(output) if line]
    (ROOT / "docs/img/terminal.svg").write_text(svg("./run_distributed.sh", lines))


if __name__ == "__main__":
    main()
