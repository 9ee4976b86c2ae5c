"""Nothing that is read executes, nothing secret is written.

The rules of the code are checked on its syntax tree. The rest are runs of one step among canaries:
files that make a folder when they are executed, in every place that a run reads from. Sockets:
tests/core/test_units_in_processes.py.
"""

import ast
import gzip
import hashlib
import io
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.requirements import Requirement
from safetensors import SafetensorError

import main_distributed
from conftest import ROOT
from ddp_utils import UserError, checkpoints
from ddp_utils import run as run_
from runs import PAIRS, QUIET, words

# --- the code ------------------------------------------------------------------------------------

FOLDERS = ("src", "scripts", "data", "docs")
CODE = {str(p.relative_to(ROOT)): p.read_text() for f in FOLDERS for p in ROOT.glob(f"{f}/**/*.py")}
CODE |= {path.name: path.read_text() for path in ROOT.glob("*.py")}
CODE |= {  # what shell scripts hand to Python
    f"{path.name}:{number}": code
    for path in (*ROOT.glob("*.sh"), *ROOT.glob("scripts/*.sh"))
    for number, code in enumerate(re.findall(r"(?s)<<'PYTHON'\n(.*?\n)PYTHON\n", path.read_text()))
}
EXECUTES = re.compile(  # what can run a file's content, a message's or a text's
    r"(_?pickle|dill|cloudpickle|marshal|shelve|joblib)(\..*)?|torch\.load|torch\.(hub|jit)\..*load.*|"
    r"torch\.distributed\.checkpoint\.(.*\.)?(load.*|.*load|FileSystemReader)|"
    r".*\.\w*(gather|scatter|broadcast|send|recv)_object(_list)?|"  # these pickle
    r"(\?|builtins\.)(eval|exec)|os\.(system|popen)|tempfile\.mktemp|"
    r"yaml\.(unsafe_|full_)?load(_all)?"
)
AUTO = re.compile(r"(transformers|peft)\.(.*\.)?Auto\w+\.from_(pretrained|config)")
AUTO_WEIGHTS = re.compile(r".*\.Auto(?!Config|Tokenizer)\w+\.from_pretrained")
KEYWORDS = dict.fromkeys(("trust_remote_code", "shell", "allow_pickle"), ["False"])  # or absent
KEYWORDS |= {"use_safetensors": ["True"], "weights_only": ["True"], "typ": ["'rt'", "'safe'"]}


def named(tree):
    """Return node -> full name of each import, name and attribute: `import torch as t` makes t.load
    torch.load."""
    names, stands_for = {}, {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                names[alias] = f"{module}{alias.name}"
                local = (
                    alias.asname or alias.name.split(".")[0]
                )  # `import torch.distributed`: torch
                stands_for[local] = names[alias] if module or alias.asname else local

    def full_name(node):
        if isinstance(node, ast.Attribute):
            return f"{full_name(node.value)}.{node.attr}"
        return stands_for.get(node.id, f"?{node.id}") if isinstance(node, ast.Name) else "?"

    uses = [node for node in ast.walk(tree) if isinstance(node, ast.Name | ast.Attribute)]
    return names | {node: full_name(node) for node in uses}


def dangers(code):
    """Return `line: what` in this source could execute what it reads, swallow every error, or use
    os.environ, which holds the user's tokens, in another way than asking for one name."""
    tree = ast.parse(code)
    names = named(tree)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    bad = []
    for node, name in names.items():
        parent = parents[node]
        is_one = isinstance(parent, ast.Subscript | ast.Compare | ast.arguments)  # env=os.environ
        is_one |= isinstance(parent, ast.Attribute) and parent.attr in ("get", "setdefault", "pop")
        if EXECUTES.fullmatch(name) or (name in ("os.environ", "os.environb") and not is_one):
            bad.append((node, name))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value == "trust_remote_code":
            bad.append((node, "a keyword in disguise"))
        elif isinstance(node, ast.ExceptHandler) and catches_all(node.type):
            # the library tokenizers raises plain exceptions; all others must be raised again
            if ast.unparse(node.body[0]) != "if type(error) is not Exception:\n    raise":
                bad.append((node, "catches everything"))
        elif isinstance(node, ast.Call):
            name = names.get(node.func, "")
            if name == "contextlib.suppress" and any(map(catches_all, node.args)):
                bad.append((node, "catches everything"))
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            needed = {"trust_remote_code"} if AUTO.fullmatch(name) else set()
            needed |= {"use_safetensors"} if AUTO_WEIGHTS.fullmatch(name) else set()
            wrong = {word for word in KEYWORDS if given.get(word) not in (None, *KEYWORDS[word])}
            bad += [(node, f"{name}: {word}") for word in wrong | (needed - given.keys())]
    return [f"{node.lineno}: {what}" for node, what in bad]


def catches_all(kind):
    return kind is None or any(getattr(n, "id", None) == "Exception" for n in ast.walk(kind))


# the official ProteinMPNN weights are pickles: read with torch's restricted reader, literally so
RESTRICTED = 'torch.load(file, map_location="cpu", weights_only=True)'


def test_no_code_can_execute_what_it_reads_or_dumps_the_environment():
    for name, code in CODE.items():
        if name == "src/dpo_inv/mpnn.py":
            assert code.count(RESTRICTED) == code.count("torch.load(") == 1
            code = code.replace(RESTRICTED, "{}")
        if name == "src/ddp_utils/launch.py":  # which starts the ranks in its own environment
            code = code.replace(", **os.environ}", "}", 1)
        assert dangers(code) == [], name


BAD = r"""
import pickle, os
import cloudpickle as cp
import torch; read = torch.load
import torch as t; t.load("f", weights_only=True)
from torch import load as read; read("f")
import torch.distributed.checkpoint as dcp; dcp.load({})
from torch.distributed import checkpoint; checkpoint.FileSystemReader("f")
import torch.distributed as dist; dist.all_gather_object([], 1)
import torch.distributed as dist; dist.scatter_object_list([])
group.send_object_list([])
eval("1")
import os; os.system("ls")
import yaml; yaml.load(text, Loader)
from ruamel.yaml import YAML; YAML(typ="unsafe")
import subprocess; subprocess.run("ls", shell=many)
import numpy as np; np.load("f", allow_pickle=True)
from transformers import AutoConfig; AutoConfig.from_pretrained("m", **options)
from transformers import AutoModel; AutoModel.from_config(c)
from transformers import AutoTokenizer as T; T.from_pretrained("m", trust_remote_code=e)
from transformers import AutoModel; AutoModel.from_pretrained("m", trust_remote_code=False)
options = {"trust_remote_code": True}
try: x()\nexcept (ValueError, Exception) as error: pass
import contextlib\nwith contextlib.suppress(Exception): x()
import os; json.dumps(os.environ.copy())
import os; env = {**os.environ}
import os; print(f"{os.environ}")
from os import environ as e; print(e)
"""
GOOD = r"""
model.eval()
json.loads("{}"); yaml = YAML(typ="safe"); yaml.load(text)
from safetensors.torch import load_file; load_file("f")
policy.load_state_dict({}); optim.load_state(policy)
import torch.distributed as dist; dist.all_reduce(t); dist.broadcast(t)
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from transformers import AutoModel as M; M.from_config(c, trust_remote_code=False)
M.from_pretrained("m", trust_remote_code=False, use_safetensors=True)
import subprocess; subprocess.run(["ls"])
try: x()\nexcept ValueError: pass
import os; os.environ["A"] = os.environ.get("B")
import os; "A" in os.environ
import os\ndef whoami(env=os.environ): pass
"""


def test_each_danger_is_seen_and_nothing_else():
    for text, is_bad in ((BAD, True), (GOOD, False)):
        for snippet in text.strip().split("\n"):
            code = snippet.replace("\\n", "\n")
            assert bool(dangers(code)) == is_bad, snippet


def test_bandit_is_content():
    where = ["src", "check_gpu.py", "scripts", "data/demo"]
    command = [sys.executable, "-m", "bandit", "-q", "-c", "pyproject.toml", "-r", *where]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


FLOORS = {  # the last version with a hole that data can reach
    "torch": "2.9.1",  # CVE-2026-24747: weights_only corrupts memory; CVE-2025-32434 runs code
    "transformers": "5.4.0",  # CVE-2026-5241, -4372 and -1839: code runs though it is not trusted
    "peft": "0.19.1",  # an adapter's config names any module, and it is imported (peft#3085)
    "filelock": "3.20.2",  # CVE-2026-22701 and CVE-2025-68146: it followed planted links
}


def test_no_version_with_a_known_hole_is_allowed():
    lines = [line.split("#")[0].strip() for line in (ROOT / "requirements.txt").open()]
    requirements = [Requirement(line) for line in lines if line[:1].isalpha()]
    allowed = {requirement.name: requirement.specifier for requirement in requirements}
    for name, version in FLOORS.items():
        assert version not in allowed[name], name


# --- canaries ------------------------------------------------------------------------------------

FLAGS = [*QUIET, "--train_data", PAIRS, *words("--max_rows 4 --batch_size 2 --max_steps 1")]
MODEL, ADAPTER = ROOT / "data/demo/model", ROOT / "tests/golden/demo_adapter"
PICKLES = words("pytorch_model.bin adapter_model.bin training_args.bin optimizer.pt scheduler.pt")
PICKLES += words("model.pt rng_state_0.pth consolidated.00.pth .metadata __0_0.distcp")
SCRIPTS = words("custom.py modeling_qwen3.py tokenization.py judge.py data.py config.py")
SCRIPTS += words("__init__.py sitecustomize.py custom_generate/generate.py")
AUTO_MAP = {"AutoConfig": "custom.Evil", "AutoModelForCausalLM": "custom.Evil"}


class Evil:
    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def saved(content):
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


@pytest.fixture
def canary(tmp_path):
    """Ways to hide code in a file, and the folder that it makes if it is executed."""
    sings = tmp_path / "canary"
    return SimpleNamespace(
        sings=sings,
        pickle=pickle.dumps({"weight": Evil(sings)}),
        archive=saved({"weight": Evil(sings)}),
        harmless=saved({"base_model.model.model.embed_tokens.weight": torch.zeros(1)}),
        script=f"import os\nos.mkdir({str(sings)!r})\n".encode(),
    )


@pytest.fixture(autouse=True)
def no_curves(monkeypatch):
    monkeypatch.setattr(run_, "write_report", lambda *_, **__: "")  # a second per run


def put(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())


def edit(path, **values):
    put(path, (json.loads(path.read_text()) if path.exists() else {}) | values)


def surround(folder, canary):
    """Put a canary under every name that some program would open beside what we read."""
    for number, name in enumerate(PICKLES):
        put(folder / name, canary.archive if number % 2 else canary.pickle)
    for name in SCRIPTS:
        put(folder / name, canary.script)


def attempt(folder, *flags):
    """Return None if a run with these flags finishes, otherwise its one line of error."""
    try:
        assert main_distributed.main([*FLAGS, *flags, "--result_dir", f"{folder}/runs/run"]) == 0
    except UserError as error:
        assert "\n" not in str(error) and str(error)
        return str(error)


def test_the_canaries_would_sing(canary):
    for wake in (
        lambda: pickle.loads(canary.pickle),
        lambda: torch.load(io.BytesIO(canary.archive), weights_only=False),
        lambda: exec(canary.script),
    ):
        wake()
        canary.sings.rmdir()


def test_files_beside_those_that_are_read_are_ignored(tmp_path, canary, monkeypatch):
    model = Path(shutil.copytree(MODEL, tmp_path / "model"))
    adapter = Path(shutil.copytree(ADAPTER, tmp_path / "adapter"))
    data = tmp_path / "data/pairs.jsonl"
    put(data, Path(PAIRS).read_bytes())
    for folder in (model, adapter, data.parent, tmp_path / "runs/run"):
        surround(folder, canary)
    edit(model / "config.json", auto_map=AUTO_MAP)
    edit(model / "tokenizer_config.json", auto_map={"AutoTokenizer": ["custom.Evil"] * 2})
    edit(model / "generation_config.json", custom_generate="custom_generate")
    auto = {"base_model_class": "Evil", "parent_library": "custom"}
    edit(adapter / "adapter_config.json", auto_mapping=auto, base_model_name_or_path=str(model))
    monkeypatch.chdir(model)
    flags = f"--model_name {model} --init_adapter {adapter} --fine_tuning lora --train_data {data}"
    flags += f" --reference_model {model} --num_samples 1 --max_new_tokens 2"
    assert attempt(tmp_path, *words(flags)) is None
    assert not canary.sings.exists()


INDEX = {"metadata": {}, "weight_map": {"w": "shard.bin"}}
CORDA = {"init_lora_weights": "corda", "corda_config": {"cache_file": "cache.pt"}}
MODULE = {"megatron_core": "evil_core", "megatron_config": {"a": 1}}
IN_DISGUISE = {"model.safetensors": "archive", "adapter_model.safetensors": "archive"}
# without its weights?, and what is added beside all canaries: a kind of canary, or values of a JSON
ATTACKS = {
    "model pickles": (True, {}),
    # transformers 5 opens what an index names, whatever use_safetensors says
    "model index": (True, {"shard.bin": "archive", "model.safetensors.index.json": INDEX}),
    "model class": (False, {"config.json": {"model_type": "evil", "auto_map": AUTO_MAP}}),
    "model in_disguise": (True, IN_DISGUISE),
    "adapter pickles": (True, {}),
    # not even a pickle that holds only tensors: there is one format, and no exceptions
    "adapter harmless": (True, {"adapter_model.bin": "harmless"}),
    # peft#3085: imported before it was checked
    "adapter module": (False, {"evil_core.py": "script", "adapter_config.json": MODULE}),
    "adapter cache": (False, {"cache.pt": "archive", "adapter_config.json": CORDA}),
    "adapter in_disguise": (True, IN_DISGUISE),
}
FLAGS_OF = {"model": ["--model_name", "--reference_model"]}
FLAGS_OF["adapter"] = [f"--fine_tuning {kind} --init_adapter" for kind in ("lora", "full")]


@pytest.mark.parametrize("name", ATTACKS)
def test_a_folder_that_would_execute_is_an_error(name, tmp_path, canary, monkeypatch):
    kind = name.split()[0]
    without_weights, additions = ATTACKS[name]
    folder = Path(shutil.copytree(MODEL if kind == "model" else ADAPTER, tmp_path / "folder"))
    for weights in folder.glob("*.safetensors") if without_weights else ():
        weights.unlink()
    surround(folder, canary)
    for file, content in additions.items():
        if isinstance(content, dict):
            edit(folder / file, **content)
        else:
            put(folder / file, getattr(canary, content))
    monkeypatch.syspath_prepend(folder)  # python -m looks in the current folder
    monkeypatch.chdir(folder)
    for flags in FLAGS_OF[kind]:
        line = attempt(tmp_path, *flags.split(), str(folder))
        assert not canary.sings.exists() and str(folder) in line, flags


def test_a_data_file_that_is_a_pickle_is_an_error(tmp_path, canary):
    contents = {"rows.pt": canary.pickle, "rows.jsonl": canary.archive}
    contents["rows.jsonl.gz"] = gzip.compress(canary.pickle)
    for name, content in contents.items():
        put(tmp_path / name, content)
        line = attempt(tmp_path, "--train_data", str(tmp_path / name))
        assert line.startswith(f"{tmp_path / name}:")
    assert not canary.sings.exists()


TEMPLATES = {
    "format": "{{ '{0.__class__.__mro__}'.format('') }}",
    "globals": "{{ cycler.__init__.__globals__.os.mkdir('CANARY') }}",
    "globals of transformers": "{{ strftime_now.__globals__['os'].mkdir('CANARY') }}",
    "include": "{% include 'FILE' %}",
}


@pytest.mark.parametrize("where", ["file", "tokenizer_config.json", "chat_template.jinja"])
def test_a_chat_template_reaches_nothing_but_the_messages(where, tmp_path, canary):
    put(tmp_path / "secret", b"{{ messages[0]['content'] }}")
    model = Path(shutil.copytree(MODEL, tmp_path / "model"))
    flags = ["--chat_template", str(model / "file")] if where == "file" else []
    for text in TEMPLATES.values():
        text = text.replace("CANARY", str(canary.sings)).replace("FILE", str(tmp_path / "secret"))
        if where == "tokenizer_config.json":
            edit(model / where, chat_template=text)
        else:
            put(model / where, text.encode())
        line = attempt(tmp_path, "--model_name", str(model), "--check", *flags)
        assert line.startswith("--chat_template: ") and not canary.sings.exists(), text


def test_a_judge_that_nobody_named_is_not_run(tmp_path, canary, monkeypatch):
    """The demo's settings have a judge, and relative names are first looked for where one is."""
    put(tmp_path / "data/demo/judge.py", canary.script)
    monkeypatch.chdir(tmp_path)
    assert main_distributed.main(["--check", "--result_dir", str(tmp_path / "run")]) == 0
    assert not canary.sings.exists()


# --- checkpoints ---------------------------------------------------------------------------------


def test_a_run_is_not_resumed_from_a_pickle(tmp_path, canary):
    """Its manifest is correct, and pickles are beside it."""
    assert attempt(tmp_path) is None
    run = tmp_path / "runs/run"
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    facts = {"shard_layout": "", "metrics_bytes": 0}
    path = checkpoints.write(run / "checkpoints", 1, {"w": torch.ones(1)}, facts)
    surround(path, canary)
    surround(run, canary)
    put(path / checkpoints.STATE, canary.pickle)
    file = {"size": len(canary.pickle), "sha256": hashlib.sha256(canary.pickle).hexdigest()}
    manifest = checkpoints.read_manifest(path)
    checkpoints.write_manifest(path, manifest | {"files": {checkpoints.STATE: file}})
    assert checkpoints.find_problem(path) is None
    with pytest.raises((SafetensorError, UserError, ValueError)):
        checkpoints.read(path)
    put(path / checkpoints.MANIFEST, canary.pickle)
    edit(run / "summary.json", status="failed")  # so that it is resumed
    line = attempt(tmp_path, "--max_steps", "2")
    assert not canary.sings.exists() and "step-00000001" in line


# --- files ---------------------------------------------------------------------------------------


def test_all_files_of_a_run_have_the_mode_that_the_umask_says(tmp_path):
    before = os.umask(0o027)
    try:
        assert attempt(tmp_path, "--fine_tuning", "lora") is None
    finally:
        os.umask(before)
    found = {path: path.stat().st_mode & 0o777 for path in (tmp_path / "runs").rglob("*")}
    assert len(found) > 8
    wrong = {p.name: oct(mode) for p, mode in found.items() if mode != 0o640 + 0o110 * p.is_dir()}
    assert wrong == {}


@pytest.mark.parametrize("name", [".", "checkpoints", ".tmp-model", "metrics.jsonl"])
def test_nothing_is_written_through_a_link_that_was_planted(name, tmp_path, monkeypatch):
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)  # the link is another user's
    put(tmp_path / "away/file", b"precious")
    link = tmp_path / "runs/run" / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(tmp_path / ("away/file" if name == "metrics.jsonl" else "away"))
    line = attempt(tmp_path)
    assert (tmp_path / "away/file").read_bytes() == b"precious"
    assert [path.name for path in (tmp_path / "away").iterdir()] == ["file"]
    assert line is None or "link" in line


# --- secrets -------------------------------------------------------------------------------------

SECRETS = {  # environment variables
    "HF_TOKEN": "hf_CanaryCanaryCanaryCanaryCanaryCana",
    "WANDB_API_KEY": "0123456789canary0123456789canary01234567",
    "AWS_SECRET_ACCESS_KEY": "CanaryCanary/Canary+CanaryCanaryCanary01",
    "AWS_ACCESS_KEY_ID": "AKIACANARYCANARYCANA",
    "SLURM_JWT": "eyJhbGciOiJIUzI1NiJ9.canary.canary",
}
PASSWORD = "s3cr3tpassw0rd"


def test_no_file_and_no_line_of_a_run_holds_a_secret(tmp_path, monkeypatch, capfd):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    # a URL with a password among the flags; it is the name of a folder, so that it works
    folder = f"https:/someone:{PASSWORD}@host"
    red = Path(PAIRS).read_bytes().replace(b'"prompt": "', b'"prompt": "\\u001b[31m')
    put(tmp_path / folder / "pairs.jsonl", red)
    flags = ["--val_data", f"https://someone:{PASSWORD}@host/pairs.jsonl"]
    flags += words("--fine_tuning lora --num_samples 1 --max_new_tokens 2")
    monkeypatch.setattr(sys, "orig_argv", ["python", "main_distributed.py", *flags])
    assert attempt(tmp_path, *flags) is None
    written = {path: path.read_bytes() for path in Path("runs/run").rglob("*") if path.is_file()}
    written |= dict(zip(("stdout", "stderr"), map(str.encode, capfd.readouterr()), strict=True))
    assert len(written) > 8
    for secret in (*SECRETS.values(), PASSWORD):
        assert [name for name, text in written.items() if secret.encode() in text] == []
    (text,) = Path("runs/run").glob("*_val.txt")
    assert "\ufffd[31m" in text.read_text() and "\x1b" not in text.read_text()
