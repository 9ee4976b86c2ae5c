"""Names on the hub, against a server that answers as the hub does: one line that helps."""

import http.server
import json
import os
import subprocess
import sys
import threading
import time

import pytest

import programs
import runs
from conftest import LIMIT, ROOT
from ranks import free_port

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
    """Answer each request with the status of the name in its path."""

    def do_HEAD(self):
        names = [name for name in ANSWERS if f"/{name}/" in self.path]
        status, code = ANSWERS[names[0]] if names else (200, "")
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD

    def log_message(self, *_):
        pass


@pytest.fixture
def port():
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
        assert messages["tokenizer"].replace("no tokenizer at ", "") == messages["model"]
        assert messages["adapter"] == f"--init_adapter: {name}: {expected}"
        assert messages["model"] == f"--model_name: {name}: {expected}"


@pytest.mark.parametrize("setting", ["model_name", "init_adapter", "train_data"])
def test_without_a_network_it_is_one_line_of_two_ranks_within_seconds(setting, tmp_path):
    if setting == "train_data":
        pytest.importorskip("datasets", reason="pip install -r requirements-data.txt")
    flags = {"train_data": runs.PAIRS, setting: "org/name", "fine_tuning": "lora"}
    words = [word for flag in flags.items() for word in (f"--{flag[0]}", flag[1])]
    command = [sys.executable, "-m", "ddp_utils.launch", "2", ROOT / "src/main_distributed.py"]
    env = environment(free_port(), tmp_path / "home")  # nobody listens there
    options = {"env": env, "capture_output": True, "text": True, "timeout": LIMIT}
    seconds = []
    for flags_of_start in (["--check", "--cache_dir", str(tmp_path / "tokens")], words):
        start = time.monotonic()  # the first start needs no network
        done = subprocess.run([*command, *flags_of_start], cwd=tmp_path, **options)
        seconds.append(time.monotonic() - start)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert seconds[1] - seconds[0] < 20 + seconds[0]  # in all 5 s of waiting; it was 50 s
    cache = os.path.join(tmp_path, "home", "hub")
    kind = "dataset" if setting == "train_data" else "model"
    for text in (
        f"org/name: neither a folder nor in the cache {cache}, and http://127.0.0.1:",
        "does not answer within 3 s (HF_HUB_ETAG_TIMEOUT)",
        f"; where there is a network, run `hf download org/name --type {kind}` (",
        "`hf auth login` before), copy the cache, and export HF_HUB_OFFLINE=1",
    ):
        assert text in done.stderr
    assert not (tmp_path / "results").exists()
