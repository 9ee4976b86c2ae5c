"""Find what is wrong with the folder of a model or adapter, and the command that helps."""

import itertools
import os
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ddp_utils import data

# settings and weights
MODEL = ("config.json", "model.safetensors")
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
# patterns of the other files that are read
READ = """*config.json *.safetensors.index.json *token* *vocab* merges.txt *.model *.tiktoken
tekken.json chat_template*"""
LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # the beginning of such a file

# What a folder may have instead of safetensors: patterns -> what helps. The first pattern counts
# that fits, and its newest file; {at} is the folder of that file.
COPY = "copy config.json and the tokenizer's files to NEW"
ZERO = "python -m deepspeed.utils.zero_to_fp32 {at} NEW --safe_serialization"
TENSORS = "import torch, safetensors.torch as s; s.save_file(torch.load('{at}/{file}', "
TENSORS += "weights_only=True), "
INSTEAD = {
    "pytorch_model_fsdp*/*.distcp *.distcp */*.distcp */*/*.distcp": "{file} is a shard of FSDP; "
    f"run `accelerate merge-weights {{at}} NEW`, and {COPY}",
    "zero_to_fp32.py global_step[0-9]*": f"{{file}} is from DeepSpeed; run `{ZERO}`, and {COPY}",
    "*_model_states.pt": "{file} is a shard of DeepSpeed; run "
    f"`{ZERO.replace('{at}', '{at}/..')}`, and {COPY}",
    "*_world_size_*_rank_*.pt */*_world_size_*_rank_*.pt": "{file} is a shard of verl; run `python "
    "-m verl.model_merger merge --backend fsdp --local_dir {at} --target_dir NEW`",
    "model/model.safetensors* model/adapter_model.safetensors": "the weights are in a folder of "
    "it; use {at}",
    "state.safetensors checkpoints/*/state.safetensors": "{file} is a checkpoint of an unfinished "
    "run; run its command again, and use the folder model of the run",
    "model-*-of-*.safetensors": "{file} is one of several files, and their index is missing; copy "
    "model.safetensors.index.json as well",
    "consolidated*": "{file} is not in the format of transformers; use the version of the model "
    "with config.json and model.safetensors",
    "*.gguf": "{file} is a GGUF file, which cannot be trained; use the original model",
    "adapter_model.bin": "{file} is not safetensors; convert it: "
    f"`python -c \"{TENSORS}'{{at}}/adapter_model.safetensors')\"`",
    "pytorch_model*.bin": '{file} is not safetensors; convert it: `python -c "from transformers '
    "import AutoModelForCausalLM as M; M.from_pretrained('{at}').save_pretrained('NEW', "
    "safe_serialization=True)\"`, and copy the tokenizer's files to NEW",
    "*model*.pt *model*.pth *.ckpt *.nemo *.h5 *.msgpack *.onnx": "{file} is not safetensors; "
    "convert it to the format of transformers (save_pretrained)",
    "*.safetensors": "{file} has another name; rename it if it has all weights",
    "*/model.safetensors* */adapter_model.safetensors */*/model.safetensors* "
    "*/*/adapter_model.safetensors": "the weights are in a folder of it; use {at}",
}


def problem_of(folder: Path, expects_adapter: bool, needs_weights: bool = True) -> str:
    """Return what is wrong with a folder and what helps, in one line; "" if nothing is.

    expects_adapter: a model is wrong, too; otherwise the weights of an adapter are not looked at.
    needs_weights: False for a plan, which needs only config.json and a tokenizer.
    """
    names = {*os.listdir(folder)}
    is_adapter = expects_adapter or ADAPTER[0] in names
    is_adapter = is_adapter or (ADAPTER[1] in names and MODEL[0] not in names)
    settings, weights = ADAPTER if is_adapter else MODEL
    index = f"{MODEL[1]}.index.json"
    for file in sorted(itertools.chain.from_iterable(map(folder.glob, READ.split()))):
        problem = problem_of_file(file)
        if problem:
            return problem
    shards = {weights} if expects_adapter or not is_adapter else set()
    if not is_adapter and weights not in names and index in names:
        shards = {*map(str, data.read_json(folder / index).get("weight_map", {}).values())}
        if not all(name.endswith(".safetensors") for name in shards):
            return f"{index} names files that are not safetensors; convert them"
    both = not is_adapter and {weights, index} <= names
    if both and weights not in data.read_json(folder / index).get("weight_map", {}).values():
        return f"{weights} is beside {index}, which names other files; remove the older weights"
    missing = []
    for name in sorted(shards):
        problem = problem_of_file(folder / name)
        if problem:
            return problem
        if not (folder / name).is_file():
            missing.append(name)
    if not missing:
        hint = f"no {settings} beside {weights}; copy it from the same model or adapter"
        return "" if settings in names else hint
    if is_adapter and names & {MODEL[1], index}:
        beside = f"{settings} is beside the weights of a full model; remove it if these contain it"
        return beside if settings in names else "it is a full model (expected a LoRA)"
    if index in names:
        count = f"{len(missing)} of {len(shards)} files that {index} names"
        return f"{count} are missing ({', '.join(missing[:3])}); download or copy them as well"
    if settings in names and not needs_weights:
        return ""
    for patterns, advice in INSTEAD.items():
        for pattern in patterns.split():
            files = sorted(folder.glob(pattern), key=lambda file: file.lstat().st_mtime)
            if files:
                return advice.format(file=files[-1].name, at=files[-1].parent)
    if settings in names:
        return f"no {weights} beside {settings}; download or copy the weights"
    return f"no {settings} (expected that of a {'LoRA' if is_adapter else 'model or LoRA'})"


def problem_of_file(file: Path) -> str:
    """Return what is wrong with a file and what helps; "" if nothing is, or if it is absent."""
    if file.is_symlink() and not file.exists():
        return f"{file.name} is a link to a file that is not here; copy the folder with `cp -rL`"
    if not file.is_file():
        return ""
    with open(file, "rb") as stream:
        if stream.read(len(LFS_POINTER)) == LFS_POINTER:
            hint = "run `git lfs pull` in its folder, or download the model with `hf download`"
            return f"{file.name} is a pointer of Git LFS; {hint}"
    if file.suffix == ".json":
        text = file.read_bytes().strip()
        is_json = text.startswith((b"{", b"[")) and text.endswith((b"}", b"]"))
        return "" if is_json else f"{file.name} is not complete or not JSON; download it again"
    if file.suffix != ".safetensors":
        return ""
    try:
        with safe_open(file, "pt") as tensors:
            shapes = [tensors.get_slice(name).get_shape() for name in tensors.keys()]  # noqa: SIM118
    except SafetensorError as error:
        return f"{file.name} is not complete or not safetensors ({error}); download it again"
    if 0 in itertools.chain.from_iterable(shapes):  # what a rank of ZeRO-3 has
        hint = f"train with stage3_gather_16bit_weights_on_model_save, or run `{ZERO}`"
        return f"{file.name} has tensors without elements; {hint.format(at=file.parent)}"
    return ""
