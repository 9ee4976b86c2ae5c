"""What all tests share: one thread per process, the real data's place, small settings."""

import os
import sys
from importlib import metadata
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each program would compile the sources again
TESTS = Path(__file__).parent
sys.path[:0] = [str(TESTS), str(TESTS.parent / "src")]
sys.path += [str(TESTS / room) for room in ("core", "runs", "sharding", "bench")]

import pytest  # noqa: E402
from packaging.version import Version  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"
# Seconds after which what hangs is ended. The slowest group of ranks needs less than a tenth of it
# on a quiet machine, so that no test is ended because a machine is slow or busy.
LIMIT = 900


def need(package, version, what):
    """Skip a test of something that fails in older versions of a package."""
    installed = metadata.version(package)
    if Version(installed) < Version(version):
        pytest.skip(f"{what}: needs {package} {version}, {installed} is installed")


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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """What measures times needs the machine alone: python -m pytest -n 0 -m bench.

    A long file begins early: the process that ends first would wait for the last one.
    """
    items.sort(key=lambda item: item.path.parent.name != "sharding")
    for item in items:
        if item.path.parent.name == "bench":
            item.add_marker("bench")


@pytest.fixture(autouse=True)
def no_traces():
    """What a test leaves in a module would blind later tests, whose programs are forks."""
    yield
    run = sys.modules.get("ddp_utils.run")
    assert not run or run.write_report.__module__ == run.__name__, "it has replaced write_report"
    distributed = sys.modules.get("ddp_utils.distributed")
    assert not distributed or distributed._store is None, "it has left a group of processes"
    if distributed:
        distributed.warnings.clear()  # each is printed once in a process
    cli = sys.modules.get("ddp_utils.cli")
    if cli:
        cli.noted.clear()


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
