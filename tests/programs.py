"""start("src/train.py", "--check") runs a program in 0.1 s; Python itself needs 1 to 4 s.

The program is a fork of the tests' process, which has already imported its modules. Its file is run
as __main__, with its last two lines, and ends through distributed.run, as it does for a user.
It must not train: PyTorch's threads do not survive a fork if the tests' process has used them.
tests/scripts/test_programs.py compares the two.
"""

import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import NamedTuple

from conftest import LIMIT, ROOT


class Ended(NamedTuple):
    returncode: int  # -14: it has not ended in time
    stdout: str
    stderr: str


def start(*words, cwd=".", env=None, seconds=LIMIT) -> Ended:
    """`python *words`, where the words are a file or -m and a module, then flags."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            _become([str(word) for word in words], cwd, env or {}, out, err, seconds)
        status = os.waitpid(child, 0)[1]
        texts = [os.pread(file.fileno(), 2**20, 0).decode() for file in (out, err)]
    return Ended(os.waitstatus_to_exitcode(status), *texts)


def environment():
    """The variables of a user who has activated this environment, without those of launchers."""
    names = "RANK WORLD LOCAL MASTER PMI PALS PBS OMPI SLURM TORCHELASTIC ACCEL NODE NNODES"
    launchers = tuple(names.split())
    clean = {name: text for name, text in os.environ.items() if not name.startswith(launchers)}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return clean | {"PATH": path, "OMP_NUM_THREADS": "1"}


def process(command, code=0, cwd=ROOT, timeout=LIMIT, **env):
    """Run a command and check its exit status."""
    command, options = [str(word) for word in command], {"cwd": cwd, "timeout": timeout}
    env = environment() | env
    done = subprocess.run(command, env=env, capture_output=True, text=True, **options)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def _become(words, cwd, env, out, err, seconds):
    """Run the program in the fork, which never returns to the tests."""
    code = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(seconds)  # a lock that a thread held before the fork is never released
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)  # as Python opens it
        warnings.showwarning = _warn
        os.environ.update(env)
        os.chdir(cwd)
        if words[0] == "-m":
            sys.modules.pop(words[1], None)
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
            runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _warn(message, category, *_):
    """Print a warning, which pytest would keep, unless Python itself does not show it."""
    if not issubclass(category, (DeprecationWarning, PendingDeprecationWarning, ResourceWarning)):
        print(f"{category.__name__}: {message}", file=sys.stderr)


def left(folder):
    """The files in a folder, except cached token ids."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return sorted(file for file in files if file.parent.name != ".tokens")
