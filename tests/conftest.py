"""What all tests share: one thread per process, the real data's place, small settings."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "src")]

import pytest  # noqa: E402
import torch  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared():
    """Real data and reference numbers that are not part of the project."""
    if not (SHARED / "data").is_dir():
        pytest.skip("needs ../shared/data and ../shared/golden, which are not part of the project")
    return SHARED


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """Folder of a LoRA run of two ranks (tests/faults.py) that nothing has disturbed."""
    import faults

    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    faults.finished(faults.start(2, folder, *faults.MODES["lora"]))
    return folder
