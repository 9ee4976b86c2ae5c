"""The house rules that a machine can check: imports, lint, sizes, one test command."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import runs
from conftest import ROOT
from ranks import ranks

SOURCES = sorted(p for p in ROOT.glob("src/**/*.py") if "egg-info" not in str(p))
ALL = [*SOURCES, ROOT / "check_gpu.py"]
SCRIPTS = {p.stem for p in ROOT.glob("src/*.py")}
PACKAGES = {p.name for p in ROOT.glob("src/*/") if (p / "__init__.py").exists()}
REACHED = {  # script -> files of ours and lines of code that its imports lead to: they only fall
    "main_distributed": (36, 3828),
    "train": (40, 4160),
    "train_loop": (37, 3746),
    "generate_data": (26, 2582),
    "dpo_inv.run_dpo_ddp": (35, 3684),
    "dpo_inv.inference": (19, 1902),
    "ad.train": (33, 3175),
    "ad.evaluate": (20, 1706),
}
SHELL = sorted([*ROOT.glob("*.sh"), *ROOT.glob("scripts/*.s[hl]*")])
# 5,000 of ddp_utils before the launcher, which was 130 lines of shell: both count in the sum
SIZES = {"src/ddp_utils": 4535, "src/dpo_inv": 1372, "src/ad": 920, ".": 215, "scripts": 347}
SIZES |= {"src/sft": 180, "src/prompt_baking": 268}


def imports(path):
    """Top-level names that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "src")))
def test_imports_flow_one_way(path):
    """Scripts import packages, packages import ddp_utils; nothing imports a script."""
    found = set(imports(path))
    if path.parent == ROOT / "src":
        assert not found & (SCRIPTS - {"config", "train_config"})
    else:
        assert not found & SCRIPTS
        assert not found & (PACKAGES - {"ddp_utils", path.parent.name})


def lines_of_code(path):
    """Lines that are neither blank nor comment nor docstring."""
    text = path.read_text()
    blank = set()
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            value = body[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                blank.update(range(value.lineno, value.end_lineno + 1))
    return sum(
        1
        for number, line in enumerate(text.splitlines(), start=1)
        if number not in blank and line.strip() and not line.lstrip().startswith("#")
    )


def imported(path, modules):
    """Names of our modules that a file imports when it is imported itself, not in a function."""
    names, nodes = set(), list(ast.parse(path.read_text()).body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        nodes += ast.iter_child_nodes(node)
    return {name for name in names if name in modules}


def test_what_a_script_reaches_only_falls():
    modules = {}
    for path in SOURCES:
        parts = path.relative_to(ROOT / "src").with_suffix("").parts
        modules[".".join(parts).removesuffix(".__init__")] = path
    reached = {}
    for script in REACHED:
        names, waiting = set(), {script}
        while waiting:
            name = waiting.pop()
            package = name.rpartition(".")[0]
            names |= {name, package} & modules.keys()
            waiting |= (imported(modules[name], modules) | {package} & modules.keys()) - names
        reached[script] = len(names), sum(lines_of_code(modules[name]) for name in names)
    print(reached)
    for script, (files, lines) in REACHED.items():
        assert reached[script][0] <= files and reached[script][1] <= lines, (script, reached)


def modules_after_a_run(folder):
    """Modules of ours that a run of the demo under DDP has imported."""
    runs.train(folder, [*runs.LORA, *runs.words("--max_rows 8 --batch_size 4 --max_steps 1")])
    return {name for name in sys.modules if name.partition(".")[0] in PACKAGES | SCRIPTS}


def test_a_run_imports_what_it_was_asked_for(tmp_path):
    reached = ranks(2, modules_after_a_run, str(tmp_path))[0] - {"ddp_utils.redact"}
    assert "main_distributed" in reached
    assert not [name for name in reached if re.search("sharding|conf$|memory_plan", name)]


def test_distillation_imports_neither_transformers_nor_peft():
    names = "print({'transformers', 'peft', 'accelerate'} & sys.modules.keys())"
    command = [sys.executable, "-c", f"import sys, ad.train; {names}"]
    done = subprocess.run(command, cwd=ROOT / "src", capture_output=True, text=True)
    assert done.stdout == "set()\n", done


def test_the_parts_only_shrink():
    sizes = {part: sum(map(lines_of_code, ROOT.glob(f"{part}/*.py"))) for part in SIZES}
    sizes["src/ddp_utils"] += sum(map(lines_of_code, ROOT.glob("src/ddp_utils/*/*.py")))
    print(sizes)
    assert all(sizes[part] <= most for part, most in SIZES.items()), sizes
    lines = "".join(path.read_text() for path in SHELL).splitlines()
    shell = sum(bool(line.strip()) and not line.lstrip().startswith("#") for line in lines)
    print(shell)
    assert sum(map(lines_of_code, ALL)) + shell <= 9241


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=" ".join)
def test_ruff_is_content(command):
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *command, "."], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_shellcheck_is_content():
    checker = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run(
        [checker, "-x", *SHELL, ROOT / ".ci/run"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_ci_runs_the_test_command_of_the_readme():
    command = re.search(r"^(python3 -m venv .*pytest)$", (ROOT / "README.md").read_text(), re.M)
    assert command.group(1) in (ROOT / ".ci/run").read_text().splitlines()


SETTINGS = ["config", "train_config", "dpo_inv.config", "ad.config", "generate_data", "train_loop"]
SETTINGS += ["dpo_inv.inference"]


@pytest.mark.parametrize("script", SETTINGS)
def test_every_setting_has_an_effect(script):
    """Each field of the settings is read somewhere: as config.name or self.name, or by its name."""
    from dataclasses import fields

    code = "".join(path.read_text() for path in SOURCES)
    names = [field.name for field in fields(importlib.import_module(script).Config)]
    unused = [name for name in names if not re.search(rf'(config|self)(\.|, "){name}\b', code)]
    # in losses.options, read_data, mark_of, and by dist.run from the command line
    by_name = {"label_smoothing", "lambda_dpop", "lambda_shift", "simpo_gamma"}
    assert set(unused) <= by_name | {"val_data", "test_data", "val_out_file", "debug"}
