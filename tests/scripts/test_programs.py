"""tests/programs.py: a program in a fork ends like one in a process of its own."""

import subprocess
import sys

import lm.merge
import programs
import train
from conftest import ROOT

# a fork is only fast if its parent has imported them
assert lm.merge and train


def process(*words, cwd=ROOT):
    """`python *words`, with imports and all."""
    done = subprocess.run([sys.executable, *words], cwd=cwd, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_a_fork_ends_as_the_program():
    for status, words in (
        (0, ("-m", "lm.merge", "-h")),
        (2, ("src/train.py", "--config", "nowhere.yaml")),
    ):
        forked = programs.start(*words, cwd=ROOT)
        assert forked == process(*words) and forked.returncode == status


def test_a_fork_that_raises_shows_the_traceback(tmp_path):
    (tmp_path / "program.py").write_text("1 / 0")
    code, _, error = programs.start("program.py", cwd=tmp_path)
    assert code == 1 and error.endswith("ZeroDivisionError: division by zero\n")


def test_distributed_setup_writes_where_it_is_called(tmp_path):
    """From any folder, without src/ on the path."""
    words = ("fsdp", "--sharding_strategy", "FULL_SHARD")
    code, output, error = process(str(ROOT / "scripts/distributed_setup.py"), *words, cwd=tmp_path)
    assert (code, error) == (0, "") and "config/fsdp_config.json" in output
    assert [*tmp_path.rglob("*.json")] == [tmp_path / "config/fsdp_config.json"]
