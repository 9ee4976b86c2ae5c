"""Where weights are looked for, and that what is fetched is checked first: without a network."""

import hashlib
import http.client
import io
import urllib.error

import pytest

from ddp_utils import UserError
from dpo_inv import weights

NAMES = [f"v_48_0{noise}{kind}" for kind in ("", "_soluble") for noise in ("02", "10", "20", "30")]


CONTENT = b"what the address of an official file holds"


@pytest.fixture
def serve(monkeypatch):
    """Set what urlopen answers instead of the network: bytes, or an exception."""

    def answer(content):
        asked = []

        def urlopen(address, timeout):
            asked.append(address)
            if isinstance(content, Exception):
                raise content
            return io.BytesIO(content)

        digest = hashlib.sha256(CONTENT).hexdigest()
        monkeypatch.setattr(weights.urllib.request, "urlopen", urlopen)
        monkeypatch.setattr(weights, "SIZE", len(CONTENT))
        monkeypatch.setattr(weights, "SHA256", dict.fromkeys(NAMES, digest))
        return asked

    return answer


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
    file.touch()
    assert weights.path_of("v_48_020_soluble", tmp_path) == file
    assert weights.path_of(file, "nowhere") == weights.path_of(str(file)) == file
    monkeypatch.chdir(tmp_path)
    assert weights.path_of(file.name).samefile(file)
    said = refused(weights.path_of, "v_48_010", tmp_path)
    assert said.endswith(f"fetch them with: python -m dpo_inv.weights v_48_010 --folder {tmp_path}")
    assert "no such file" in refused(weights.path_of, str(tmp_path / "my.pt"), tmp_path)
    for name in "v_48_20", "", "../v_48_020", "v_48_020\n":
        assert "v_48_030_soluble" in refused(weights.path_of, name, tmp_path)
        assert "v_48_030_soluble" in refused(weights.fetch, name, tmp_path)


def test_what_is_fetched_is_checked_and_not_fetched_again(tmp_path, serve, capsys):
    asked = serve(CONTENT)
    folder = tmp_path / "deep/weights"
    weights.main(["v_48_030_soluble", "--folder", str(folder)])
    assert asked == [weights.url_of("v_48_030_soluble")]
    file = folder / "v_48_030_soluble.pt"
    assert capsys.readouterr().out.splitlines() == [f"from {asked[0]}", str(file)]
    assert file.read_bytes() == CONTENT and list(folder.iterdir()) == [file]
    assert weights.path_of("v_48_030_soluble", folder) == file
    weights.main(["v_48_030_soluble", "--folder", str(folder)])
    assert len(asked) == 1, "what is there is not fetched again"


DAMAGED = {"cut": CONTENT[:-1], "longer": CONTENT + b"x", "flipped": b"?" + CONTENT[1:]}


@pytest.mark.parametrize("damage", DAMAGED)
def test_another_file_is_not_kept(tmp_path, serve, damage):
    serve(DAMAGED[damage])
    said = refused(weights.fetch, "v_48_020", tmp_path)
    assert "is another file" in said and hashlib.sha256(CONTENT).hexdigest() in said
    assert list(tmp_path.iterdir()) == []


ERRORS = [
    urllib.error.URLError(OSError(-2, "Name or service not known")),
    urllib.error.HTTPError("https://x", 404, "Not Found", {}, None),
    TimeoutError("timed out"),
    http.client.IncompleteRead(b"", 10),
]


def test_without_a_network_one_line_tells_what_to_do(tmp_path, serve):
    for error in ERRORS:
        serve(error)
        said = refused(weights.fetch, "v_48_020", tmp_path)
        assert said.startswith("v_48_020: cannot be fetched: ")
        assert weights.url_of("v_48_020") in said and said.endswith(str(tmp_path / "v_48_020.pt"))
        assert list(tmp_path.iterdir()) == []
