"""Questions and replies in, batches and exact divergences out."""

import json

import pytest
import torch

from conftest import ROOT
from ddp_utils import UserError, models, optim
from ddp_utils.models import load_tokenizer
from ddp_utils.readers import Encoder
from ddp_utils.readers.tables import DataFile
from prompt_baking import distillation, trajectories
from prompt_baking.train_config import Config
from prompt_baking.trajectories import Trajectory

MODEL = str(ROOT / "data/demo/model")


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def student():
    """The demo's model under a LoRA that is not zero."""
    torch.manual_seed(0)
    config = Config(model_name=MODEL, lora_r=4)
    precision = optim.Precision.choose(torch.device("cpu"), "lora", config.base_dtype)
    model = models.load_policy(config, torch.device("cpu"), precision)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.05)
    return distillation.Student(model)


@pytest.fixture(scope="module")
def encoder():
    return Encoder(load_tokenizer(MODEL))


def test_question_files_as_people_have_them(tmp_path):
    for row in (
        {"question": "Why?", "answer": "#### 4"},  # GSM8K
        {"question_id": 81, "turns": ["Why?", "And then?"]},  # MT-Bench
        {"prompt": "Why?"},
        {"instruction": "Why?", "output": "Because."},
    ):
        path = write(tmp_path / "q.jsonl", [row, {"question": "How?"}, row])
        assert trajectories.read_questions(path) == ["Why?", "How?"]  # each once
        assert trajectories.read_questions(path, 1) == ["Why?"]
    with pytest.raises(UserError, match="2 different questions; --num_questions is 3"):
        trajectories.read_questions(path, 3)
    (tmp_path / "q.txt").write_text("Why?\n\n  How?  \r\nWhy?\n")
    assert trajectories.read_questions(tmp_path / "q.txt") == ["Why?", "How?"]
    (tmp_path / "q.csv").write_text('ask,question\n"Why, then?",1\nHow?,2\n')

    def read(path):
        return DataFile(str(path), columns="question=ask").records()

    assert trajectories.read_questions(tmp_path / "q.csv", read=read) == ["Why, then?", "How?"]
    write(tmp_path / "q.jsonl", [{"ask": "Why?"}, 3])
    with pytest.raises(UserError, match="q.jsonl:2: not a JSON object"):
        trajectories.read_questions(tmp_path / "q.jsonl", read=read)


def test_the_prompt_is_a_system_turn_or_stands_in_front(encoder):
    tokenizer = encoder.tokenizer
    alone, prompted = trajectories.prompts(encoder, "Answer in capital letters.\n", "Why?")
    text = "<|im_start|>system\nAnswer in capital letters.<|im_end|>\n<|im_start|>user\nWhy?"
    text += "<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(prompted) == text
    assert tokenizer.decode(alone) == text[text.index("<|im_start|>user") :]
    plain = Encoder(load_tokenizer(MODEL), "none")
    alone, prompted = trajectories.prompts(plain, "Be loud.\n", "Why?")
    assert [tokenizer.decode(ids) for ids in (alone, prompted)] == ["Why?", "Be loud.\nWhy?"]


def test_long_replies_are_cut_and_rows_without_room_dropped(encoder, tmp_path):
    row = {"question": "Why?", "x0": "Loud.", "tokens": [5, 6, 7, 8]}
    path = write(tmp_path / "t.jsonl", [row, row | {"tokens": [5]}, row | {"x0": "Loud. " * 30}])
    prompt = len(trajectories.prompts(encoder, "Loud.", "Why?")[1])
    found, report = trajectories.read(path, encoder, prompt + 3)
    assert [t.reply for t in found] == [[5, 6, 7], [5]]
    assert (report["cut"], report["dropped"]) == ([f"{path}:1"], [f"{path}:3"])


def test_tokens_of_another_model_are_noticed(encoder, tmp_path):
    row = {"question": "Why?", "x0": "Loud.", "reply": "Because."}
    row["tokens"] = encoder.ids("Because.")[0]
    assert trajectories.read(write(tmp_path / "t.jsonl", [row]), encoder, 100)[0]
    row["tokens"] = row["tokens"][::-1]
    with pytest.raises(UserError, match=r"t.jsonl:1: tokens: they spell .* of another model"):
        trajectories.read(write(tmp_path / "t.jsonl", [row]), encoder, 100)


ROWS = [
    Trajectory([1, 7, 8], [1, 20, 21, 22, 7, 8], [30, 31, 32, 2], "a:1", "?"),
    Trajectory([1, 9], [1, 20, 21, 22, 9], [40], "a:2", "?"),  # the first token is the only one
    Trajectory([1, 9, 10, 11, 12], [1, 23, 9, 10, 11, 12], [40, 41], "a:3", "?"),
]


def by_hand(model, row):
    """Token by token: whole next-token distributions from the model's own logits, in float64."""
    total = 0.0
    for place in range(len(row.reply)):
        said = row.reply[:place]
        with torch.no_grad():
            mine = model(torch.tensor([row.student + said])).logits[0, -1].double().log_softmax(-1)
            with model.disable_adapter():
                ids = torch.tensor([row.teacher + said])
                other = model(ids).logits[0, -1].double().log_softmax(-1)
        total += (other.exp() * (other - mine)).sum().item()
    return total


def test_every_token_counts_the_first_one_too(student):
    batch = student.teach(trajectories.collate(ROWS, "cpu"))
    expected = [by_hand(student.model, row) for row in ROWS]
    assert min(expected) > 0.01
    assert student(batch)[0].tolist() == pytest.approx(expected, rel=1e-5)
    student.own_head = True  # as of a model whose head is not plain
    try:
        assert student(student.teach(batch))[0].tolist() == pytest.approx(expected, rel=1e-5)
    finally:
        student.own_head = False


def test_under_autocast_a_long_reply_is_summed_in_fp32(student):
    """1,000 tokens: a sum in bf16 stalls at 256 times its terms."""
    row = Trajectory([1, 7], [1, 20, 7], [5 + n % 200 for n in range(1000)], "a:1", "?")
    whole = student(student.teach(trajectories.collate([row], "cpu")))[0].item()
    student.autocast = torch.bfloat16
    try:
        batch = student.teach(trajectories.collate([row], "cpu"))
        with torch.no_grad():
            (seen,) = student(batch)
        (trained,) = student(batch)
    finally:
        student.autocast = None
    assert seen.dtype == trained.dtype == torch.float32
    assert seen.item() == pytest.approx(trained.item(), rel=1e-3)
    assert seen.item() == pytest.approx(whole, rel=0.05)
