"""Names on the hub, against a server that answers as the hub does: one line that helps."""

import http.server
import json
import os
import re
import socketserver
import subprocess
import sys
import threading
import urllib.parse
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from huggingface_hub import constants

import programs
import runs
import scale
from conftest import LIMIT, ROOT
from ddp_utils import data_sets, distributed
from lm import model_files, models
from ranks import free_port, run_ranks

DEMO = ROOT / "data/demo/model"

ANSWERS = {  # name of a model -> status and error code of the hub, as documented by huggingface_hub
    "gated": (401, "GatedRepo"),  # nobody is logged in
    "denied": (403, "GatedRepo"),  # logged in, without access
    "absent": (404, "RepoNotFound"),
    "private": (401, "RepoNotFound"),
    "forbidden": (403, ""),
}
LOGIN = "run `hf auth login`, or export HF_TOKEN"
LINES = {
    "gated": "is gated; accept its terms on http://127.0.0.1:{port}/org/gated, then " + LOGIN,
    "denied": "is gated; accept its terms on http://127.0.0.1:{port}/org/denied, then " + LOGIN,
    "absent": "neither a folder nor a model on the hub; check the name; if it is private, " + LOGIN,
    "private": "neither a folder nor a model on the hub; check the name; if it is private, "
    + LOGIN,
    "forbidden": "the hub answers 403 Forbidden: None.; if it denies access, " + LOGIN,
}
PROGRAM = """
import json, sys
from ddp_utils import UserError
from lm import lora, models
def message(read, name):
    try:
        read(name)
    except UserError as error:
        return str(error)
readers = {"tokenizer": models.load_tokenizer, "adapter": lora.adapter_settings}
readers["model"] = lambda name: models.load(name, "auto", models.META)
print(json.dumps({n: {k: message(f, n) for k, f in readers.items()} for n in sys.argv[1:]}))
"""


class Hub(http.server.BaseHTTPRequestHandler):
    """Answer each request with the status of the name in its path; org/demo is the demo's model.

    Each time somebody asks for its newest commit, there is a newer one.
    """

    requests: Counter = Counter()  # path, or "HEAD path" -> number

    def do_HEAD(self):
        names = [name for name in ANSWERS if f"/{name}/" in f"{self.path}/"]
        status, code = ANSWERS[names[0]] if names else (200, "")
        body, headers = b"", {"X-Error-Code": code} if code else {}
        path = urllib.parse.urlparse(self.path).path
        commit = (re.findall("[0-9a-f]{40}", path) or [""])[0]
        path = path.replace(commit, "COMMIT") if commit else path
        self.requests[path if self.command == "GET" else f"HEAD {path}"] += 1
        if path == "/org/demo/resolve/COMMIT/" + (file := Path(path).name):
            headers = {"X-Repo-Commit": commit, "ETag": f'"{file}"'}
            status = 200 if (DEMO / file).exists() else 404
            body = (DEMO / file).read_bytes() if status == 200 else b""
        elif path == "/api/models/org/demo/revision/main":
            files = [{"rfilename": file.name} for file in DEMO.iterdir()]
            commit = f"{self.requests[path]:040x}"
            body = json.dumps({"id": "org/demo", "sha": commit, "siblings": files}).encode()
        elif path == "/api/models/org/demo/tree/COMMIT":
            facts = [{"path": file.name, "size": file.stat().st_size} for file in DEMO.iterdir()]
            body = json.dumps([{**fact, "type": "file", "oid": "0"} for fact in facts]).encode()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body if self.command == "GET" else b"")

    do_GET = do_HEAD

    def log_message(self, *_):
        pass


@pytest.fixture
def port():
    Hub.requests = Counter()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()


def environment(port, home):
    env = programs.environment() | {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(home)}
    env.pop("HF_HUB_OFFLINE", None)
    return env | {"PYTHONPATH": str(ROOT / "src")}


def test_an_answer_of_the_hub_is_one_line_with_the_way_out(port, tmp_path):
    names = [f"org/{name}" for name in ANSWERS]
    env = environment(port, tmp_path)
    command = [sys.executable, "-c", PROGRAM, *names]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT)
    assert done.stderr == ""
    for name, messages in json.loads(done.stdout).items():
        expected = LINES[name.removeprefix("org/")].replace("{port}", str(port))
        assert messages["tokenizer"] == messages["model"]
        assert messages["adapter"] == f"--init_adapter: {name}: {expected}"
        assert messages["model"] == f"--model_name: {name}: {expected}"


TWO_RANKS = [sys.executable, "-m", "ddp_utils.launch", "2", ROOT / "src/main_distributed.py"]


ALIKE = [pytest.param(x, marks=pytest.mark.show) for x in ("model_name", "init_adapter")]


@pytest.mark.parametrize("setting", ["train_data", *ALIKE])
def test_without_a_network_it_is_one_line_of_two_ranks_after_one_question(setting, tmp_path):
    if setting == "train_data":
        pytest.importorskip("datasets", reason="pip install -r requirements-data.txt")
    flags = {"train_data": runs.PAIRS, setting: "org/name", "fine_tuning": "lora"}
    words = [word for flag in flags.items() for word in (f"--{flag[0]}", flag[1])]
    hangs_up = socketserver.BaseRequestHandler  # without an answer
    server = socketserver.TCPServer(("127.0.0.1", 0), hangs_up)
    with server, mock.patch.object(hangs_up, "handle") as asked:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        env = environment(server.server_address[1], tmp_path / "home")
        options = {"env": env, "capture_output": True, "text": True, "timeout": LIMIT}
        done = subprocess.run([*TWO_RANKS, *words], cwd=tmp_path, **options)
        server.shutdown()
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert asked.call_count == 1
    cache = os.path.join(tmp_path, "home", "hub")
    command, then = "hf download org/name", "copy the cache, and export HF_HUB_OFFLINE=1"
    if setting == "train_data":  # offline, the library datasets does not find such a download
        command += " --type dataset --local-dir FOLDER"
        then = "copy FOLDER, and use it instead of the name"
    for text in (
        f"org/name: neither a folder nor in the cache {cache}, and http://127.0.0.1:",
        "does not answer within 3 s (HF_HUB_ETAG_TIMEOUT)",
        f"; where there is a network, run `{command}` (",
        f"`hf auth login` before), {then}",
    ):
        assert text in done.stderr
    assert not (tmp_path / "results").exists()


# --- one rank asks -------------------------------------------------------------------------------


def load_from_hub(ports, caches):
    """Load a model by name as a training script does; return its commit.

    ports, caches: of the hub, for each node; there are equally many ranks on each.
    """
    per_node = int(os.environ["WORLD_SIZE"]) // len(ports)
    node, local_rank = divmod(int(os.environ["RANK"]), per_node)
    os.environ |= {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(per_node)}
    constants.HF_HUB_OFFLINE = data_sets.IS_OFF = False
    data_sets.SECONDS = 60  # this machine may be busy
    constants.HF_HUB_CACHE = caches[node]
    constants.ENDPOINT = f"http://127.0.0.1:{ports[node]}"
    constants.HUGGINGFACE_CO_URL_TEMPLATE = (
        constants.ENDPOINT + "/{repo_id}/resolve/{revision}/{filename}"
    )
    distributed.init_process_group(distributed.whoami())
    tokenizer = models.load_tokenizer("org/demo")
    model = models.load("org/demo", "auto", models.META)
    assert model.name_or_path == tokenizer.name_or_path == "org/demo"
    rows = Path(caches[0], "rows")

    def library(_path, _place, revision):  # in place of datasets, which takes seconds to import
        rows.mkdir(exist_ok=True)
        (rows / f"asked by {os.environ['RANK']} for {revision}").touch()
        return SimpleNamespace(cache_files=[{"filename": str(rows)}])

    data_sets._load = library
    assert data_sets.arrow_files("org/rows") == [str(rows)]
    return Path(model_files.model_path("org/demo", with_weights=True)).name


def test_the_requests_at_the_hub_do_not_grow_with_the_ranks_of_a_node(port, tmp_path):
    expected: Counter = Counter()
    for number, (ranks, nodes) in enumerate([(1, 1), (4, 2)]):
        Hub.requests.clear()
        caches = [str(tmp_path / f"{number}{node}") for node in range(nodes)]
        outcome = run_ranks(ranks, load_from_hub, [port] * nodes, caches)
        assert outcome.results == [f"{1:040x}"] * ranks, outcome.logs
        files = Counter({k: n for k, n in Hub.requests.items() if "/resolve/" in k})
        expected = expected or files
        assert files == {name: nodes * count for name, count in expected.items()}
        assert Hub.requests["/api/models/org/demo/revision/main"] == 1
        assert os.listdir(tmp_path / f"{number}0/rows") == ["asked by 0 for None"]
        assert Hub.requests["/org/demo/resolve/COMMIT/model.safetensors"] == nodes
    Hub.requests.clear()  # with one cache, the second node does not need the hub
    shared = [str(tmp_path / "shared")] * 2
    outcome = run_ranks(4, load_from_hub, [port, free_port()], shared)
    assert outcome.results == [f"{1:040x}"] * 4, outcome.logs
    assert Hub.requests["/org/demo/resolve/COMMIT/model.safetensors"] == 1


def test_512_ranks_ask_the_hub_once_and_the_store_a_few_times_each(tmp_path):
    for count, nodes in ((64, 8), (512, 64)):
        requests, asked = scale.hub(count, tmp_path)
        assert asked == [(0, None)]  # rank 0, for no certain commit
        assert requests == 5 * count + 2 * nodes  # add, twice wait and get; once more wait and get


def test_a_node_that_cannot_reach_the_hub_ends_all_with_one_line(port, tmp_path):
    caches = [str(tmp_path / "node0"), str(tmp_path / "node1")]
    outcome = run_ranks(4, load_from_hub, [port, free_port()], caches)
    joined, log = "".join(sorted(outcome.logs)).splitlines()
    assert outcome.codes == [2] * 4 and joined.startswith("Node 1 of 2 joined: 2 processes; ")
    assert log.startswith("error: --model_name: org/demo: neither a folder nor in the cache")
    assert "node1" in log and "does not answer within 60 s" in log
