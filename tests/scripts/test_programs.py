"""Programs as processes of their own end as in tests/programs.py, by which the unit tests do it."""

import subprocess
import sys

import ddp_utils.tools.merge
import programs
import train
from conftest import ROOT

# which a fork must have imported, or it would take as long
assert ddp_utils.tools.merge and train


def process(*words, cwd=ROOT):
    """`python *words`, with imports and all."""
    done = subprocess.run([sys.executable, *words], cwd=cwd, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_a_fork_ends_as_the_program():
    for status, words in (
        (0, ("-m", "ddp_utils.tools.merge", "-h")),
        (2, ("src/train.py", "--config", "nowhere.yaml")),
    ):
        forked = programs.start(*words, cwd=ROOT)
        assert forked == process(*words) and forked.returncode == status


def test_a_fork_that_raises_shows_the_traceback(tmp_path):
    (tmp_path / "program.py").write_text("1 / 0")
    code, _, said = programs.start("program.py", cwd=tmp_path)
    assert code == 1 and said.endswith("ZeroDivisionError: division by zero\n")


def test_distributed_setup_writes_where_it_is_called(tmp_path):
    """From any folder, without src/ on the path."""
    words = ("fsdp", "--sharding_strategy", "FULL_SHARD")
    code, said, wrong = process(str(ROOT / "scripts/distributed_setup.py"), *words, cwd=tmp_path)
    assert (code, wrong) == (0, "") and "config/fsdp_config.json" in said
    assert [*tmp_path.rglob("*.json")] == [tmp_path / "config/fsdp_config.json"]
