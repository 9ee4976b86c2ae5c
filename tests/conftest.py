"""What all tests share: one thread per process, the real data's place, small settings."""

import fcntl
import os
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
TESTS = Path(__file__).parent
sys.path[:0] = [str(TESTS), str(TESTS.parent / "src")]
sys.path += [str(TESTS / room) for room in ("core", "runs", "sharding")]

import pytest  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"


def pytest_configure(config):
    """Of each process that runs tests; the one that hands them out to others need not import it."""
    if config.getoption("numprocesses", 0) and not hasattr(config, "workerinput"):
        return
    import hypothesis
    import torch

    torch.set_num_threads(1)
    # a machine that is busy with something else is no finding
    hypothesis.settings.register_profile(
        "busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("busy")


@contextmanager
def locked(name, how):
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", os.getpid())
    with open(Path(tempfile.gettempdir()) / f"tests_{run}_{name}", "w") as file:
        fcntl.flock(file, how)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Tests run two at a time (pytest-xdist), but one that takes the time has the machine alone."""
    alone = item.path.parent.name == "bench"
    with locked("door", fcntl.LOCK_EX):  # who waits alone lets nobody else in
        room = locked("room", fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        room.__enter__()
    try:
        return (yield)
    finally:
        room.__exit__(None, None, None)


@pytest.fixture(autouse=True)
def no_traces():
    """Runs in tests make no report; one that replaces it for good would blind later tests."""
    yield
    run = sys.modules.get("ddp_utils.runs.run")
    assert not run or run.write_report.__module__ == run.__name__, "it has replaced write_report"


@pytest.fixture(scope="session")
def shared():
    """Real data, which is not part of the project: a test that needs it is an extra."""
    if not (SHARED / "data").is_dir():
        pytest.skip("an extra: needs ../shared/data, which is not part of the project")
    return SHARED


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """Folder of a LoRA run of two ranks (tests/faults.py) that nothing has disturbed."""
    import faults

    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    faults.finished(faults.start(2, folder, *faults.MODES["lora"]))
    return folder
