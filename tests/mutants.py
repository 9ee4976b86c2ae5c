"""Put each fault of tests/mutants.toml into a copy of the project: its tests must fail there.

    python tests/mutants.py                      # all faults, one after the other
    python tests/mutants.py clip_off "cuda_*"    # these
    python tests/mutants.py --clean              # the same tests without a fault: they must pass

Run by hand. A fault whose old text does not stand in its file exactly once is stale.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests" / "mutants.toml"


def read():
    """The faults by id, in the order of the file."""
    try:
        import tomllib
    except ImportError:
        sys.exit("tests/mutants.py needs Python 3.11 or newer, which reads TOML")
    return {fault["id"]: fault for fault in tomllib.loads(LIST.read_text())["fault"]}


def copy_project(folder):
    """Copy what git tracks or would track to folder/main, with ../shared beside it."""
    names = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(names, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).exists():
            target = folder / "main" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
    if (ROOT.parent / "shared").is_dir():
        (folder / "shared").symlink_to((ROOT.parent / "shared").resolve())
    return folder / "main"


def run_tests(project, tests, seconds):
    """The exit status of pytest in `project` and its last line; a hanging run is killed."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "-p", "no:cacheprovider"]
    path = f"{project / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    env = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    env["COLUMNS"] = "300"  # of a line that says which test failed, and why
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command += ["--tb=no", "-m", "", *tests]  # also those of a marker
    process = subprocess.Popen(command, cwd=project, env=env, start_new_session=True, **options)
    try:
        lines = process.communicate(timeout=seconds)[0].strip().splitlines()
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        return process.returncode, (failed or lines)[-1]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return 124, f"no end within {seconds} s"


def try_fault(fault, seconds):
    """noticed, NOT NOTICED, stale or no verdict; and why."""
    with tempfile.TemporaryDirectory() as folder:
        project = copy_project(Path(folder))
        for edit in [fault, *fault.get("also", [])]:
            file = project / edit["file"]
            text = file.read_text() if file.exists() else ""
            if text.count(edit["old"]) != 1:
                return "stale", f"{edit['file']} has its old text {text.count(edit['old'])} times"
            file.write_text(text.replace(edit["old"], edit["new"]))
        status, line = run_tests(project, fault["tests"], seconds)
    return {0: "NOT NOTICED", 1: "noticed"}.get(status, "no verdict"), line


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ids", nargs="*", help="of the faults; none: all")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time")
    parser.add_argument("--seconds", type=int, default=300, help="for the tests of a fault")
    parser.add_argument("--clean", action="store_true", help="run the tests without a fault")
    options = parser.parse_args()
    words = options.ids or ["*"]
    faults = [f for name, f in read().items() if any(fnmatch(name, word) for word in words)]
    if options.clean:
        tests = sorted({test for fault in faults for test in fault["tests"]})
        with tempfile.TemporaryDirectory() as folder:
            status, line = run_tests(copy_project(Path(folder)), tests, 3600)
        print(line)
        return status

    def attempt(fault):
        start = time.perf_counter()
        verdict, line = try_fault(fault, options.seconds)
        print(f"{verdict:11} {fault['id']:18} {time.perf_counter() - start:5.1f} s  {line}")
        sys.stdout.flush()
        return verdict

    with ThreadPoolExecutor(options.jobs) as pool:
        verdicts = list(pool.map(attempt, faults))
    print(", ".join(f"{verdicts.count(kind)} {kind}" for kind in sorted(set(verdicts))))
    return int(set(verdicts) != {"noticed"})


if __name__ == "__main__":
    sys.exit(main())
