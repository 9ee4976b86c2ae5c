"""Where weights are looked for, and that what is fetched is checked first: without a network."""

import hashlib
import importlib.util

import pytest

from ddp_utils import UserError
from dpo_inv import weights

NAMES = [f"v_48_0{noise}{kind}" for kind in ("", "_soluble") for noise in ("02", "10", "20", "30")]
CONTENT = b"what the address of an official file holds"


@pytest.fixture
def site(monkeypatch, tmp_path):
    """Official files in a folder in place of the network."""
    for kind in ("vanilla", "soluble"):
        folder = tmp_path / f"site/{kind}_model_weights"
        folder.mkdir(parents=True)
        (folder / "v_48_020.pt").write_bytes(CONTENT)
    digest = hashlib.sha256(CONTENT).hexdigest()
    monkeypatch.setattr(weights, "SOURCE", (tmp_path / "site").as_uri())
    monkeypatch.setattr(weights, "SHA256", dict.fromkeys(NAMES, digest))
    return tmp_path / "site"


def refused(fn, *args):
    with pytest.raises(UserError) as caught:
        fn(*args)
    message = str(caught.value)
    assert message.splitlines() == [message]
    return message


def test_the_addresses_are_https_and_of_one_commit():
    assert list(weights.SHA256) == NAMES
    assert len({*weights.SHA256.values()}) == 8
    assert {len(digest) for digest in weights.SHA256.values()} == {64}
    for name in NAMES:
        host, owner, project, commit, folder, file = weights.url_of(name)[8:].split("/")
        assert (host, owner, project) == ("raw.githubusercontent.com", "dauparas", "ProteinMPNN")
        assert weights.url_of(name).startswith("https://") and len(commit) == 40
        assert file == f"{name.removesuffix('_soluble')}.pt"
        assert folder == ("soluble" if "soluble" in name else "vanilla") + "_model_weights"


def test_a_name_is_looked_up_in_the_folder_and_a_path_is_taken_as_it_is(tmp_path, monkeypatch):
    file = tmp_path / "v_48_020_soluble.pt"
    file.write_bytes(CONTENT)
    digest = hashlib.sha256(CONTENT).hexdigest()
    monkeypatch.setattr(weights, "SHA256", dict.fromkeys(NAMES, digest))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # no package
    assert weights.path_of("v_48_020_soluble", tmp_path) == file
    assert weights.path_of(file, "nowhere") == weights.path_of(str(file)) == file
    monkeypatch.chdir(tmp_path)
    assert weights.path_of(file.name).samefile(file)
    said = refused(weights.path_of, "v_48_010", tmp_path)
    assert said.endswith(f"fetch them with: python -m dpo_inv.weights v_48_010 --folder {tmp_path}")
    assert "no such file" in refused(weights.path_of, str(tmp_path / "my.pt"), tmp_path)
    file.write_bytes(CONTENT + b"x")
    assert refused(weights.path_of, "v_48_020_soluble", tmp_path).startswith(f"{file}: not the off")
    assert refused(weights.fetch, "v_48_020_soluble", tmp_path).endswith("remove it, or rename it")
    for name in "v_48_20", "", "../v_48_020":
        assert "v_48_030_soluble" in refused(weights.path_of, name, tmp_path)
        assert "v_48_030_soluble" in refused(weights.fetch, name, tmp_path)


def test_what_is_fetched_is_checked_and_not_fetched_again(tmp_path, site, capsys):
    name, folder = "v_48_020_soluble", tmp_path / "deep/weights"
    weights.main([name, "--folder", str(folder)])
    file = folder / f"{name}.pt"
    assert capsys.readouterr().out.splitlines() == [f"from {weights.url_of(name)}", str(file)]
    assert file.read_bytes() == CONTENT and list(folder.iterdir()) == [file]
    assert weights.path_of(name, folder) == file
    (site / "soluble_model_weights/v_48_020.pt").unlink()
    weights.main([name, "--folder", str(folder)])  # what is there is not fetched again


def test_another_file_is_not_kept_and_without_a_network_one_line_tells_what_to_do(tmp_path, site):
    file = site / "vanilla_model_weights/v_48_020.pt"
    folder = tmp_path / "weights"
    damaged = {"cut": CONTENT[:-1], "longer": CONTENT + b"x", "flipped": b"?" + CONTENT[1:]}
    for content in (*damaged.values(), None):
        file.write_bytes(content) if content else file.unlink()
        says = refused(weights.fetch, "v_48_020", folder)
        assert says.startswith("v_48_020: cannot be fetched: ")
        assert ("invalid hash value" in says) == bool(content)
        assert weights.url_of("v_48_020") in says and says.endswith(str(folder / "v_48_020.pt"))
        assert list(folder.iterdir()) == []


def test_the_installed_package_is_the_second_to_be_looked_at(tmp_path, monkeypatch):
    """By its folder alone: its code is not imported."""
    folder = tmp_path / "site/proteinmpnn"
    file = folder / "data/soluble_model_weights/v_48_010.pt"
    file.parent.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('it was imported')")
    file.write_bytes(CONTENT)
    digest = hashlib.sha256(CONTENT).hexdigest()
    monkeypatch.setattr(weights, "SHA256", dict.fromkeys(NAMES, digest))
    monkeypatch.syspath_prepend(str(folder.parent))
    importlib.invalidate_caches()
    assert weights.path_of("v_48_010_soluble", tmp_path) == file
    own = tmp_path / "v_48_010_soluble.pt"
    own.write_bytes(CONTENT)
    assert weights.path_of("v_48_010_soluble", tmp_path) == own
    own.unlink()
    file.write_bytes(CONTENT[::-1])
    assert "not the official v_48_010_soluble, or damaged" in refused(
        weights.path_of, "v_48_010_soluble", tmp_path
    )
