"""Every command of README and docs: launchers and scripts accept it as it is written.

Scripts are called with --check, which parses, reads and checks everything and trains nothing. Runs
that train with these commands are in the other files of this folder, one for each guide.
"""

import ast
import importlib
import math
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import parse_args

import programs
import runs
from conftest import ROOT
from ddp_utils import cli
from ranks import ranks

PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), ROOT / "results/README.md"]
# what a reader has in the clone and this machine has not: path -> a file or folder
MINE = {
    "mine.jsonl": runs.PAIRS,
    "mine.json": "data/input/test_data_real.json",
    "structures": "data/input/structures",
    "Qwen/Qwen3-0.6B": "data/demo/model",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "data/demo/model",
    "data/smollm2": "data/demo/model",
    "data/manners.json": runs.PAIRS,
    "data/instructions.json": "data/demo/instructions.jsonl",
    "results/short/model": "tests/golden/demo_adapter",
    "data/pirate.txt": "data/demo/x0.txt",
    "x0.txt": "data/demo/x0.txt",
    "questions.jsonl": "data/demo/questions_train.jsonl",
}
TEXTS = {".py", ".sh", ".toml", ".in", ".j2", ".yaml"}  # in folders with code
SCRIPTS = ["src/main_distributed.py", "src/train.py", "src/generate_data.py", "src/ad/train.py"]
SCRIPTS += ["dpo_inv.run_dpo_ddp"]
# by their first words: what other tests run, and what needs another machine or the network
ELSEWHERE = {
    "python3 -m venv": "tests/scripts/test_style.py",
    "python check_gpu.py": "tests/scripts/test_check_gpu.py",
    "python scripts/distributed_setup.py": "tests/scripts/test_distributed_setup.py",
    "python scripts/get_smollm2.py": "tests/golden/test_smollm2.py",
    "python src/train_loop.py": "tests/scripts/test_baking.py",
    "python src/ad/evaluate.py": "tests/scripts/test_distillation.py",
    "python -m dpo_inv.inference": "tests/scripts/test_protein.py",
    "python -m dpo_inv.evaluate": "tests/scripts/test_stability.py",
    "python -m lm.chat": "tests/scripts/test_chat.py",
    "python -m ddp_utils.tools.report": "tests/runs/test_report.py",
    "python tests/bench/": "tests/bench",
    "bash scripts/run_training.sh": "tests/runs/test_clusters.py",
    "sbatch": "tests/runs/test_clusters.py",
    "qsub": "tests/runs/test_aurora.py",
    "pip install": "README.md",
    "book=": None,
    "curl": None,
    "echo": None,
    "python -c 'import datasets": None,
    ". .venv/bin/activate": None,
    "export NNODES": "tests/runs/test_launchers.py",
    "module load": None,
    "python -m venv --system": None,
    "grep -v": None,
    "tail -f": None,
}


def commands():
    """(page, command) of all fenced lines of bash."""
    for page in PAGES:
        for block in re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.M | re.S):
            for line in re.sub(r"\\\n\s*", " ", block).splitlines():
                if line.strip() and not line.startswith("#"):
                    yield pytest.param(page.name, line, id=f"{page.stem}: {line[:70]}")


def program_of(line):
    """Return (file or module, its words) that a command starts; None for the protein demo."""
    words = shlex.split(line.partition("||")[0], comments=True)
    while re.fullmatch(r"\w+=\S*", words[0]):
        words.pop(0)
    if words[:2] == ["accelerate", "launch"]:
        args = launch_command_parser().parse_args(words[2:])
        return args.training_script, args.training_script_args
    if words[0] == "torchrun":
        args = parse_args(words[1:])
        return args.training_script, args.training_script_args
    if words[0] == "./run_dpo_ddp_local.sh":
        return None
    if words[0] == "./run_distributed.sh":
        words = words[2:] if words[1:2] and words[1].isdigit() else words[1:]
        if words[:1] == ["baking"]:
            return "src/generate_data.py", words[1 : [*words, "--"].index("--")]
        return "src/main_distributed.py", words
    place = next(place for place, word in enumerate(words) if word in SCRIPTS)
    return words[place], words[place + 1 :]


@pytest.fixture
def clone(tmp_path):
    """The folder in which a reader types: what is in a clone, and MINE."""
    paths = [path.relative_to(ROOT) for path in [*ROOT.glob("*"), *ROOT.glob("data/*")]]
    there = {str(path): path for path in paths if path.name not in ("data", "results")}
    for name, target in {**there, **MINE}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        if name.startswith("results/"):  # there, links are errors
            shutil.copytree(ROOT / target, tmp_path / name)
        else:
            (tmp_path / name).symlink_to(ROOT / target)
    (tmp_path / "mine.csv").write_text(
        "pdb,chain,mutation,ddG\ndata/input/structures/bundle_00.pdb,A,R2A,1.5\n"
    )
    return tmp_path


@pytest.mark.parametrize(("page", "line"), [*commands()])
def test_a_command_works_as_it_is_written(page, line, clone):
    """In the top folder of the project, which every page means."""
    for beginning, where in ELSEWHERE.items():
        if line.startswith(beginning) or "src/train_loop.py" in line:
            assert where is None or (ROOT / where).exists()
            flags = re.search(r"(src/(?:train_loop|ad/evaluate).py|-m (?:dpo_inv|lm)\S+)(.*)", line)
            if flags:  # it reads its flags and ends, for what it evaluates is not there
                env = {cli.ONLY_FLAGS: "1"}
                words = [*flags[1].split(), *shlex.split(flags[2])]
                done = programs.start(*words, cwd=clone, env=env)
                # dpo_inv.evaluate reads its flags and its files together
                assert done.returncode == 0 or "no such file" in done.stderr, done.stderr
            return
    program = program_of(line)
    if program:
        name, words = program
        if {"mine.json", "mine.csv"} & {*words}:  # the official weights are on a server
            words = [*words, "--base_model_name", "data/demo/protein_model.pt"]
        start = [name] if "/" in name else ["-m", name]
        done = programs.start(*start, *words, "--check", cwd=clone)
        assert done.returncode == 0, done.stderr


def test_bash_can_parse_every_block():
    for page in PAGES:
        blocks = re.findall(r"^ *```(?:bash|sh)\n(.*?)^ *```", page.read_text(), re.M | re.S)
        if blocks:
            programs.process(["bash", "-n", "-c", "\n".join(blocks)])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("http"):
            continue
        name, _, heading = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.+)$", file.read_text(), re.M)
            slugs = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
            assert heading in slugs, target


def test_the_tree_of_the_readme_is_the_tree_on_the_disk():
    """All at the top is named, and each folder of src/ with code in it."""
    (tree,) = re.findall(r"^## Files\n\n```\n(.*?)^```", PAGES[0].read_text(), re.M | re.S)
    named = set()
    for line in tree.splitlines():
        names = re.match(r"[^\s,]+(, [^\s,]+)*", line).group()
        assert len(line) > len(names), f"{names}: without a remark"
        named.update(names.split(", "))
    git = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if git.returncode:
        pytest.skip("needs a git checkout")
    there = set()
    for path in git.stdout.splitlines():
        folder, _, file = path.rpartition("/")
        if not path.startswith("."):
            there.add(path.partition("/")[0] + "/" * bool(folder))
        if path.startswith("src/") and file.endswith(".py"):
            there.add(f"{folder}/")
    assert named == there


def test_the_snippet_of_the_readme_loads_a_result(tmp_path):
    """Unchanged, after a run of three steps."""
    (snippet,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    flags = runs.words("--max_steps 3 --max_rows 24 --num_samples 0 --log_every 1000")
    flags += ["--val_data", runs.PAIRS, "--test_data", runs.PAIRS]
    ranks(1, runs.main, [*flags, "--result_dir", str(tmp_path / "results/dpo")])
    shown = programs.process([sys.executable, "-c", snippet], cwd=tmp_path).stdout
    assert "What color is a banana?" in shown


@pytest.mark.show
def test_the_script_of_the_api_page_trains_alike_on_one_and_two_processes(tmp_path):
    """As it is written, but with its own folder; the first loss is ln 2."""
    (script,) = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs/api.md").read_text(), re.M | re.S
    )
    (tmp_path / "my_dpo.py").write_text(script)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    outputs = []
    for command in ([], launch):
        done = programs.process([sys.executable, *command, "my_dpo.py"], cwd=tmp_path)
        outputs.append([float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)])
    assert outputs[0][0] == pytest.approx(math.log(2), abs=1e-5) and len(outputs[0]) == 10
    assert outputs[0][-1] < 0.6
    assert outputs[1] == pytest.approx(outputs[0], abs=2e-5)


def test_the_version_is_the_same_everywhere():
    """In the package, the citation, the newest entry of the changelog and the newest notes."""
    places = {
        "pyproject.toml": r'^version = "(.+)"$',
        "CITATION.cff": r"^version: (.+)$",
        "CHANGELOG.md": r"^## (\S+)",
        "docs/releases.md": r"^## (\S+)",
    }
    found = {name: re.search(at, (ROOT / name).read_text(), re.M)[1] for name, at in places.items()}
    assert len({*found.values()}) == 1, found


OTHERS = {  # messages of other programs: the operating system, torch and argparse of torchrun
    "Address already in use",
    "CUDA out of memory",
    "ambiguous option: --r could match",
}
# what differs: `...`, a first field, quotes, numbers, names with _ or ., capitals, and these words
WORDS = "cuda|xpu|nccl|chosen responses|preferred sequences|[A-Z]{2,}"
VARIES = rf"\.\.\.|^\w+:|'[^']*'|[^\s;,()]*[\d_./][^\s;,()]*|\b(?:{WORDS})\b"


def quoted_messages():
    """(page, message) of the first column of the tables of messages."""
    for page in PAGES:
        tables = re.findall(r"^\| message.*\n\|[-|]+\n((?:\|.*\n)+)", page.read_text(), re.M)
        for line in "".join(tables).splitlines():
            for message in re.findall(r"`([^`]+)`", line.split(" | ")[0]):
                if message not in OTHERS:
                    yield page.name, message


def texts_of_the_code():
    """The strings of each function and class, without comments and docstrings."""
    for path in [*ROOT.glob("src/**/*.py"), *ROOT.glob("scripts/*.py"), ROOT / "check_gpu.py"]:
        for part in ast.parse(path.read_text()).body:
            nodes = [*ast.walk(part)]
            docs = [node.value for node in nodes if isinstance(node, ast.Expr)]
            strings = [node for node in nodes if isinstance(node, ast.Constant)]
            yield "\n".join(str(node.value) for node in strings if node not in docs)
    yield from (path.read_text() for path in [*ROOT.glob("*.sh"), *ROOT.glob("scripts/*.sh")])


def test_quoted_messages_are_those_of_the_code():
    """Their fixed pieces are in the strings of one function."""
    texts = [*texts_of_the_code()]
    unknown = []
    for page, message in quoted_messages():
        pieces = [piece.strip(" :;,") for piece in re.split(VARIES, message)]
        patterns = [rf"(?<!\w){re.escape(piece)}(?!\w)" for piece in pieces if piece]
        assert patterns, message
        if not any(all(re.search(one, text) for one in patterns) for text in texts):
            unknown.append((page, message))
    assert unknown == []


PHRASES = r"""anew|goes on|carr(y|ies) on|begins again|else but for|a line says|to the bit|to mend
(nats|tokens|seconds|bytes) an? (token|step|second|row|rank)|(is|are) (refused|taken as)"""


def test_phrases_that_are_always_wrong_stay_away():
    """CONTRIBUTING's language: what was once translated word by word."""
    written = [*PAGES, *ROOT.glob("C*.md"), ROOT / "data/demo/README.md", *ROOT.glob("*.sh")]
    for folder in ("src", "scripts", "tests"):
        written += [path for path in (ROOT / folder).rglob("*.*") if path.suffix in TEXTS]
    wrong = re.compile(rf"\b({'|'.join(PHRASES.splitlines())})\b", re.I)
    found = []
    for path in written:
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if wrong.search(line) and path != Path(__file__):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert found == []


def test_the_settings_page_has_the_settings_of_today(monkeypatch):
    """`python docs/make_settings.py` writes them; by hand: two lines of src/config.py."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    page = importlib.import_module("make_settings").page()
    assert (ROOT / "docs/settings.md").read_text() == page
    assert "| `lora_r` | integer | `16` | rank of the LoRA |" in page
    assert "| `check` | switch | `False` | read and check everything, then exit without" in page


# published numbers of parameters
PARAMETERS = {"Qwen3-0.6B": 596049920, "Qwen3-4B": 4022468096, "Qwen3-8B": 8190735360}
PARAMETERS |= {"Qwen3-32B": 32762123264, "Llama-3-70B": 70553706496, "Qwen3-30B-A3B": 30532122624}


def test_the_page_what_fits_has_the_predictions_of_today(monkeypatch):
    """One row is predicted again; of all models, the sizes of the files, by hand."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    make_fits = importlib.import_module("make_fits")
    page = (ROOT / "docs/fits.md").read_text()
    assert make_fits.row_of_fits("Qwen3-0.6B", "lora") in page
    assert PARAMETERS.keys() == make_fits.MODELS.keys()
    for model, parameters in PARAMETERS.items():
        sizes = [2e-9 * parameters, 12e-9 * parameters]  # bf16; fp32 and two moments
        cells = [f"{size:,.0f}" if size >= 10 else f"{size:.1f}" for size in sizes]
        assert f"| {model}, full | {' | '.join(cells)} |" in page


def test_the_architecture_page_names_every_module():
    page = (ROOT / "docs/architecture.md").read_text()
    table = page[page.index("## Modules") : page.index("## Data flows")]
    named = set(re.findall(r"`(\w+)[/`]", table))
    modules = set()
    for package in ("ddp_utils", "lm"):
        modules |= {path.stem for path in ROOT.glob(f"src/{package}/*.py")}
        modules |= {path.parent.name for path in ROOT.glob(f"src/{package}/*/*.py")}
    assert modules - named == set()
