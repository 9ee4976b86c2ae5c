"""Find the files of a model or adapter, and describe errors in them in one line.

A name is a folder, or a model on the Hugging Face hub.
"""

import contextlib
import importlib.util
import itertools
import os
import re
import reprlib
import threading
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers import PreTrainedTokenizerBase as Tokenizer

from ddp_utils import UserError, data, distributed, is_first_of_node, out_of_memory

Name = str | Path  # of a model: a folder, or a name on the hub
META = torch.device("meta")  # tensors on it have a name and a shape, and no content
# the exceptions of transformers, peft and the file readers for files that do not fit together
FAULTS: tuple[type[Exception], ...] = (ArithmeticError, AssertionError, AttributeError, ImportError)
FAULTS += (LookupError, OSError, RuntimeError, TypeError, ValueError)
FAULTS += (SafetensorError, StrictDataclassError, re.error)
# the ends of tensors that only files of quantized weights have
PACKED = (".qweight", ".absmax", ".SCB", "_scale", "_scale_inv")
WEIGHTS = "model.safetensors"
BLOCK = 2**20  # bytes of a request to read ahead
# patterns of the files of a model on the hub that are read before its weights, and of an adapter's
HUB_FILES: tuple[str, ...] = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.bpe")
HUB_FILES += ("adapter_model.safetensors",)
# patterns of the files that have a tokenizer's vocabulary
VOCABULARIES = ("tokenizer.json", "tekken.json", "*.model", "*.tiktoken", "*vocab*", "*.bpe")
# a text that tokenizers split in different ways: numbers, apostrophes, white space, other scripts,
# an accent of its own, which some normalizers join to its letter
PROBE = (
    "\n1984 cats,  don't\n\n\tI'LL say (x_1<y):\nz = 12345.67; naïve e\u0301 हिन्दी 你好，世界 😀"
)


class LoraSpec(NamedTuple):
    """The adapter of a run: lora.py adds it to a model, and is imported only if there is one."""

    r: int = 16  # rank
    alpha: int = 32  # the adapter's output is multiplied by alpha / r
    dropout: float = 0.0
    targets: str = "all-linear"  # or names of layers and fused weights: q_proj,v_proj
    init_adapter: str = ""  # folder of a LoRA to start from, instead of a new one
    merge: bool = False  # merge init_adapter into the model, and train all weights

    @classmethod
    def of(cls, config: Any) -> "LoraSpec | None":
        """Return the adapter in a script's settings, or None if there is none."""
        merge = config.fine_tuning == "full"
        if merge and not config.init_adapter:
            return None
        shape = config.lora_r, config.lora_alpha, config.lora_dropout, config.lora_targets
        return cls(*shape, config.init_adapter, merge)


# --- files ----------------------------------------------------------------------------------------


def model_folder(field: str, folder: str) -> Path:
    """Return the folder of the model that a run has saved, or the folder itself if it is no run.

    field: the setting, for errors. Raises UserError if there is no such folder or no model yet.
    """
    run = data.resolve(folder)
    if not run.is_dir():
        raise UserError(f"{field}: there is no folder {folder} (expected one such as results/dpo)")
    is_run = (run / "summary.json").exists()
    settings = data.read_json(run / "config.json") if is_run else {}
    environment = run / "environment.json"
    facts = data.read_json(environment) if is_run and environment.exists() else {}
    model = data.resolve(data.model_of_run(run, settings, facts))
    if is_run and not model.is_dir():
        summary = data.read_json(run / "summary.json")
        problem = f"is {summary.get('status')} after step {summary.get('step')} and has no model"
        raise UserError(f"{field}: the run {folder} {problem}; run its command again to finish it")
    return model if model.is_dir() else run


def full_name(name: Name) -> str:
    """Return the absolute path of a folder, which is looked up as data are, or a hub name."""
    folder = data.resolve(name)
    if folder.is_dir():
        return str(folder.resolve())  # peft records it as the base of an adapter
    if folder.is_file():
        expected = "expected the folder of a model in safetensors; a GGUF file cannot be trained"
        raise UserError(f"--model_name: {name} is a file ({expected})")
    if str(name).startswith((".", "/", "~")) or str(name).count("/") > 1:
        raise UserError(f"--model_name: there is no folder {name}; use a folder or a hub name")
    return str(name)


def is_on_hub(name: Name) -> bool:
    """Return whether a name is that of a model on the hub."""
    return not Path(full_name(name)).is_absolute()


def model_path(name: Name, with_weights: bool = False) -> str:
    """Return the absolute path of a folder; of a model on the hub, that of its files in the cache.

    All ranks must call this for a name on the hub. with_weights: False for all files but a model's
    weights.
    """
    if not is_on_hub(name):
        return full_name(name)
    from ddp_utils import data_sets  # it is not needed for folders

    folder = data_sets.snapshot(str(name), HUB_FILES)
    if with_weights:
        index = folder / f"{WEIGHTS}.index.json"
        shards = data.read_json(index)["weight_map"].values() if index.exists() else [WEIGHTS]
        data_sets.snapshot(str(name), tuple(sorted({*shards})), folder.name)
    return str(folder)


def read_ahead(name: Name) -> None:
    """Let the system read the weights into its page cache, once per node.

    Loading maps the files, and each rank would read them by page faults of a few KiB, which is slow
    on a parallel file system. Linux shortens long requests: of a file of 300 MB, 8 MB were read.
    """
    if not hasattr(os, "posix_fadvise") or not is_first_of_node():
        return

    def request() -> None:
        for path in Path(model_path(name)).glob("*.safetensors"):
            with open(path, "rb") as file:
                for start in range(0, path.stat().st_size, BLOCK):
                    os.posix_fadvise(file.fileno(), start, BLOCK, os.POSIX_FADV_WILLNEED)

    threading.Thread(target=request, daemon=True).start()


def find_file(name: Name, file: str) -> str | None:
    """Return the path of a file of a model; None if there is none, or if it has the weights."""
    path = Path(model_path(name)) / file
    return str(path) if path.exists() else None


def is_adapter(name: Name, needs_weights: bool = True) -> bool:
    """Return whether a folder, or a model on the hub, is an adapter; see check_folder()."""
    place = f"--model_name: {name}"
    check_folder(place, name, needs_weights=needs_weights)
    with reading(place):
        return find_file(name, "adapter_config.json") is not None


def check_folder(
    place: str, name: Name, expects_adapter: bool = False, needs_weights: bool = True
) -> None:
    """Raise UserError if a library could not open a folder, or only with a misleading message.

    place: the flag and its value; the others: see folder_doctor.problem_of().
    """
    if is_on_hub(name):
        return
    folder = Path(model_path(name))
    from lm import folder_doctor  # it is not needed for a model on the hub

    with reading(place):
        problem = folder_doctor.problem_of(folder, expects_adapter, needs_weights)
    if problem:
        raise UserError(f"{place}: {problem}")


# --- tokenizers -----------------------------------------------------------------------------------


def read_tokenizer(name: Name) -> Tokenizer:
    """Return the tokenizer in a folder or on the hub; raise UserError if it has no vocabulary.

    Without its files, transformers makes a tokenizer with special tokens only for some models.
    """
    place = f"--model_name: {name}"
    failure = "tokenizer or config.json cannot be read"
    path = Path(model_path(name))
    has_files = not path.is_dir() or any(map(any, map(path.glob, VOCABULARIES)))
    pieces = path / "tokenizer.model"
    if pieces.is_file() and not (path / "tokenizer.json").is_file():
        # of SentencePiece, unless it is a text as tiktoken has it
        is_binary = pieces.read_bytes()[:1] == b"\n"
        if is_binary and not importlib.util.find_spec("sentencepiece"):
            problem = "tokenizer.model needs a library, since there is no tokenizer.json"
            raise UserError(f"{place}: {problem}; pip install sentencepiece protobuf")
    own: set[int] = set()
    with reading(place, failure), contextlib.suppress(*(() if has_files else FAULTS)):
        tokenizer = AutoTokenizer.from_pretrained(model_path(name), trust_remote_code=False)
        tokenizer = as_in_file(tokenizer, path / "tokenizer.json")
        tokens_of(tokenizer, PROBE)
        own = {*tokenizer.get_vocab().values()} - {*tokenizer.all_special_ids}
        own -= {*tokenizer.added_tokens_decoder}
        tokenizer.name_or_path = full_name(name)
        backend = getattr(tokenizer, "backend_tokenizer", None)  # none if it is not fast
        if getattr(backend, "fix_mistral_regex", None) is False:
            problem = "tokenizer.json may split texts in another way than Mistral's own tokenizer"
            hint = "use the files of AutoTokenizer.from_pretrained(..., fix_mistral_regex=True)"
            distributed.warn(f"warning: {name}: {problem}; if it is a model of Mistral, {hint}")
        template = path / "chat_template.json"  # transformers reads it for processors only
        if not tokenizer.chat_template and template.is_file():
            tokenizer.chat_template = data.read_json(template).get("chat_template")
    if len(own) < 2:
        hint = "copy the tokenizer's files (tokenizer.json or its like) from the original model"
        raise UserError(f"--model_name: no tokenizer at {name}: it has no vocabulary; {hint}")
    return tokenizer


def as_in_file(tokenizer: Tokenizer, file: Path) -> Tokenizer:
    """Return a tokenizer that splits texts as its tokenizer.json says.

    Many classes of transformers 5 read the vocabulary from this file and replace its other parts by
    those of another model (transformers issues 45812, 45920, 48206). In this case, a warning is
    printed.
    """
    is_verbatim = type(tokenizer) is PreTrainedTokenizerFast  # it has replaced nothing
    if is_verbatim or not tokenizer.is_fast or not file.is_file():
        return tokenizer
    own = PreTrainedTokenizerFast(tokenizer_file=str(file))
    special = [token.content for token in own.added_tokens_decoder.values() if token.special]
    # if tokenizer_config.json decides on a space before the first word, that is not compared
    decides = tokenizer.init_kwargs.get("add_prefix_space") is not None
    text = PROBE if decides else "".join([PROBE, *special[:1], " ", PROBE])
    expected, tokens = tokens_of(own, text), []
    with contextlib.suppress(ValueError):  # the file's own may know more letters
        tokens = tokens_of(tokenizer, text)
    if decides:
        count = min(len(tokens), len(expected)) - 2
        tokens, expected = tokens[-count:], expected[-count:]
    if tokens == expected:
        return tokenizer
    kind = type(tokenizer).__name__
    line = f"warning: {file.parent}: {kind} of transformers splits texts in another way than"
    distributed.warn(f"{line} tokenizer.json; the file is right, and is used")
    named, vocabulary = {}, own.get_vocab()
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):  # a class may have defaults
        token = getattr(tokenizer, name)
        if token in vocabulary:
            named[name] = token
    return PreTrainedTokenizerFast.from_pretrained(file.parent, trust_remote_code=False, **named)


def tokens_of(tokenizer: Tokenizer, text: str) -> list[str]:
    """Return the tokens of a text; raise ValueError if a letter has none, not even the unknown one.

    The library tokenizers raises a plain Exception for it.
    """
    try:
        return tokenizer.tokenize(text)
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise ValueError(str(error)) from error


def check_same_tokens(name: str, tokenizer: Tokenizer) -> None:
    """Raise UserError if the tokenizer of another model gives token ids to other tokens.

    Added tokens are not compared, since a model may give reserved ones new names; nor is a folder
    without a tokenizer.
    """
    if find_file(name, "tokenizer_config.json") is None:
        return
    other = read_tokenizer(name)
    added = {*tokenizer.get_added_vocab(), *other.get_added_vocab()}
    ids = {token: token_id for token, token_id in other.get_vocab().items() if token not in added}
    for token, token_id in tokenizer.get_vocab().items():
        if ids.get(token, token_id) != token_id:
            problem = f"{name}: token {data.shown(token)} has the id {ids[token]}, not {token_id}"
            raise UserError(f"--model_name: {problem}; use a model with the same tokenizer")


def unknown(tokenizer: Any, texts: Sequence[str]) -> dict[str, Any]:
    """Return the fraction of unknown tokens in texts, and an example of them, or "".

    Some tokenizers have one unknown token for several words: it counts once per 10 characters that
    do not come back from the ids. Others drop what they do not know: then it is the fraction of
    characters. Case, accents and white space do not count.
    """
    if not texts:
        return {"fraction": 0.0, "example": ""}
    # its text is a token like others if it is the end token, too
    texts = [text.replace(tokenizer.unk_token or "\0", "") for text in texts]
    ids_of_texts = tokenizer(texts, add_special_tokens=False, verbose=False).input_ids
    unk = tokenizer.unk_token_id
    counts: Counter = Counter()
    example = ""
    for text, ids in zip(texts, ids_of_texts, strict=True):
        known = [token for token in ids if token != unk]
        expected = characters(text)
        back = characters(tokenizer.decode(known))
        lost = (expected - back).total()
        missing = max(len(ids) - len(known), lost // 10) if len(known) < len(ids) else 0
        counts.update(known=len(known) if back else 0, unknown=missing)
        counts.update(characters=expected.total(), lost=lost)
        if (lost or missing) and not example:
            example = f"{reprlib.repr(text)} becomes {reprlib.repr(tokenizer.decode(ids))}"
    fraction = counts["lost"] / max(counts["characters"], 1)
    if counts["unknown"]:
        fraction = counts["unknown"] / (counts["known"] + counts["unknown"])
    return {"fraction": round(fraction, 4), "example": example}


def characters(text: str) -> Counter:
    """Return how often each letter, digit, sign and symbol occurs, without case and accents."""
    counts = Counter(unicodedata.normalize("NFKD", text.casefold()))
    return Counter({c: n for c, n in counts.items() if unicodedata.category(c)[0] in "LNPS"})


def describe_unknown(place: str, result: dict[str, Any], limit: float = 0.5) -> list[str]:
    """Return a warning about unknown tokens, if there are more than 5 %.

    place: of the texts; result: what unknown() returns. Raises UserError above the limit.
    """
    percent, example = f"{100 * result['fraction']:.1f} %", result["example"]
    line = f"{place}: {percent} of the tokens are unknown to the tokenizer ({example})"
    line += "; use the tokenizer of this model, or a model for this language"
    if result["fraction"] > limit:
        raise UserError(line)
    return [f"warning: {line}"] if result["fraction"] > 0.05 else []


# --- errors ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def reading(place: str, problem: str = "cannot be read") -> Iterator[None]:
    """Turn an exception of a library that reads model files into a UserError of one line.

    place: the flag and its value; problem: what the user asked for.
    """
    try:
        yield
    except FAULTS as error:
        if out_of_memory(error):
            raise
        from ddp_utils import data_sets  # it is not needed for folders

        of_hub = data_sets.explain(place.rpartition(" ")[2], error)
        message = of_hub or f"{problem}: {one_line(error)}"
        if "custom code" in message:
            message = "it needs its own code, which is not run; use a model type of transformers"
        if f"no file named {WEIGHTS}" in message:  # of the hub; a folder has been checked
            message = "it has no safetensors; convert it with from_pretrained and save_pretrained"
        raise UserError(f"{place}: {message}") from error


def one_line(error: BaseException) -> str:
    """Return a library's error message as one line: its first sentences, none of which is cut."""
    text = f"KeyError: {error}" if isinstance(error, KeyError) else str(error)
    first, *others = re.split(r"(?<=[.!?]) (?=[A-Z`'\"(\[])", " ".join(text.split()))
    line = first or type(error).__name__
    for sentence in others:
        if len(line) + len(sentence) > 300:
            break
        line += f" {sentence}"
    return line


def check_complete(
    place: str,
    missing: Collection[str],
    unexpected: Collection[str],
    misshapen: Collection[str],
    advice: str = "use weights and config.json of the same model",
) -> None:
    """Raise UserError unless the files have exactly the tensors of the model.

    place: the flag and its value; missing, unexpected, misshapen: names of tensors.
    """
    kinds = {"are missing": missing, "have another shape": misshapen, "are unexpected": unexpected}
    problems = []
    for kind, names in kinds.items():
        if names:
            problems.append(f"{len(names)} tensors {kind} ({', '.join(sorted(names)[:3])})")
    if missing and unexpected:
        pairs = itertools.product(sorted(missing)[:100], sorted(unexpected)[:100])
        renamed = (pair for pair in pairs if pair[1].endswith(f".{pair[0]}"))
        pair = next(renamed, (min(missing), min(unexpected)))
        if pair[1].endswith(f".{pair[0]}"):
            advice = "rename the tensors in the files"
        expected, actual = (name.split(".") for name in pair)
        while expected and actual and expected[-1] == actual[-1]:
            expected, actual = expected[:-1], actual[:-1]
        begin = (
            f"expected names that begin with {'.'.join(expected)}" if expected else "expected less"
        )
        problems.append(f"{begin}, the files have {'.'.join(actual) or 'less'}")
    if problems:
        if any(name.endswith(PACKED) for name in unexpected):
            advice = "its weights are quantized; use the original model"
        raise UserError(f"{place}: {'; '.join(problems)}; {advice}")


@torch.no_grad()
def check_finite(place: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise UserError for the first tensor with a value that is not finite; place: its file."""
    for name, tensor in tensors.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if not local.sum(dtype=torch.float32).isfinite():  # faster than a look at each value
            raise UserError(f"{place}: {name}: not all values are finite; use another checkpoint")


def check_weights(model: Any) -> None:
    """Raise UserError for the first weight of a model with a value that is not finite."""
    weights = {name.replace(".base_layer", ""): x for name, x in model.named_parameters()}
    check_finite(f"--model_name: {model.name_or_path}", weights)


def set_untied(model: Any) -> None:
    """Record that the output layer has a weight of its own, for models.save() and others."""
    model.config.get_text_config().tie_word_embeddings = False
    model.config.tie_word_embeddings = False
