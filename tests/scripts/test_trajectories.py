"""Questions and replies in, batches and exact divergences out."""

import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch

import train_loop
from conftest import ROOT
from ddp_utils import UserError, distributed
from ddp_utils.policy import Precision
from lm import models, sampling
from lm.chat_template import Encoder
from lm.models import load_tokenizer
from prompt_baking import distillation, replies, trajectories
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
    precision = Precision.choose(torch.device("cpu"), "lora", config.base_dtype)
    adapter = models.LoraSpec(4, config.lora_alpha, 0.0, config.lora_targets)
    model = models.load_policy(MODEL, adapter, precision, torch.device("cpu"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.05)
    return distillation.Student(model)


@pytest.fixture(scope="module")
def encoder():
    return Encoder(load_tokenizer(MODEL))


QUESTIONS = [
    {"question": "Why?", "answer": "#### 4"},  # GSM8K
    {"question_id": 81, "turns": ["Why?", "And then?"]},  # MT-Bench
    {"prompt": "Why?"},
    {"prompt": [{"role": "system", "content": "S"}, {"role": "user", "content": "Why?"}]},
    {"prompt": '[{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]'},
    {"turns": '["Why?", "And then?"]'},  # from CSV
    {"instruction": "Why?", "output": "Because."},
    {"instruction": "Why?", "input": "", "context": ""},
]


@pytest.mark.parametrize("row", QUESTIONS, ids=str)
def test_question_files_as_people_have_them(row, tmp_path):
    path = write(tmp_path / "q.jsonl", [row, {"question": "How?"}, row])
    assert trajectories.read_questions(path) == ["Why?", "How?"]  # each once
    assert trajectories.read_questions(path, 1) == ["Why?"]
    assert trajectories.read_questions(path, 88) == ["Why?", "How?"]  # a file of one's own
    with pytest.raises(UserError, match="q.jsonl: 0 records"):
        trajectories.read_questions(write(path, []))


def test_what_belongs_to_a_question_is_read_or_named(tmp_path):
    """Alpaca's input follows its instruction, as in the other scripts; Dolly has a context."""
    rows = [{"instruction": "Translate.", "input": text} for text in ("One.", "Two.", "")]
    path = write(tmp_path / "q.jsonl", rows)
    questions = ["Translate.\nOne.", "Translate.\nTwo.", "Translate."]
    assert trajectories.read_questions(path) == questions
    path = write(path, [{"instruction": "When did it start?", "context": "It began in 2000."}])
    message = "q.jsonl:1: context: it may belong to .*: --columns ignored_context=context.$"
    with pytest.raises(UserError, match=message):
        trajectories.read_questions(path)
    ignored = trajectories.read_questions(path, columns="ignored_context=context")
    assert ignored == ["When did it start?"]


def test_the_system_text_of_a_question_is_named(tmp_path):
    path = write(tmp_path / "q.jsonl", [{"prompt": "Why?", "system": "Be brief."}])
    with pytest.raises(UserError, match="q.jsonl:1: system: it may belong to the question; .*"):
        trajectories.read_questions(path)
    assert trajectories.read_questions(path, columns="ignored_system=system") == ["Why?"]


def test_prompts_and_questions_that_a_template_has_rendered_are_errors(encoder, tmp_path):
    (tmp_path / "p.txt").write_text("<|im_start|>system\nBe loud.<|im_end|>")
    with pytest.raises(UserError, match="p.txt: .*: contains .*; remove it, use messages"):
        trajectories.read_prompts(str(tmp_path / "p.txt"), encoder, {})
    for text in ("<|im_start|>user\nHi", "Be brief.\nHi<|im_end|>\n<|im_start|>assistant\n"):
        for role in ("user", "system"):
            with pytest.raises(UserError, match="q.txt: .*: (begins with|contains) "):
                trajectories.check_turns("q.txt", ["Why?", text], encoder, role)
        for system, question in (("Loud.", text), (text, "Why?")):
            with pytest.raises(UserError, match="^prompt: (begins with|contains) "):
                trajectories.prompt(encoder, system, question)
        trajectories.check_turns("q.txt", [text], Encoder(encoder.tokenizer, "none"))


def test_questions_in_lines_and_tables(tmp_path):
    (tmp_path / "q.txt").write_text("Why?\n\n  How?  \r\nWhy?\n")
    assert trajectories.read_questions(tmp_path / "q.txt") == ["Why?", "How?"]
    (tmp_path / "q.csv").write_text('ask,question\n"Why, then?",1\nHow?,2\n')
    questions = trajectories.read_questions(tmp_path / "q.csv", columns="question=ask")
    assert questions == ["Why, then?", "How?"]


def test_the_prompt_is_a_system_turn_or_stands_in_front(encoder):
    tokenizer = encoder.tokenizer
    prompts = ("", "Answer in capital letters.\n")
    alone, prompted = (trajectories.prompt(encoder, system, "Why?") for system in prompts)
    text = "<|im_start|>system\nAnswer in capital letters.<|im_end|>\n<|im_start|>user\nWhy?"
    text += "<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(prompted) == text
    assert tokenizer.decode(alone) == text[text.index("<|im_start|>user") :]
    plain = Encoder(load_tokenizer(MODEL), "none")
    alone, prompted = (trajectories.prompt(plain, x0, "Why?") for x0 in ("", "Be loud.\n"))
    assert [tokenizer.decode(ids) for ids in (alone, prompted)] == ["Why?", "Be loud.\nWhy?"]


def test_long_replies_are_cut_and_rows_without_room_dropped(encoder, tmp_path):
    row = {"question": "Why?", "x0": "Loud.", "tokens": [5, 6, 7, 8]}
    path = write(tmp_path / "t.jsonl", [row, row | {"tokens": [5]}, row | {"x0": "Loud. " * 30}])
    prompt = len(trajectories.prompt(encoder, "Loud.", "Why?"))
    found, report = trajectories.read(path, encoder, prompt + 3)
    assert [t.reply for t in found] == [[5, 6, 7], [5]]
    assert (report["cut"], report["dropped"]) == ([f"{path}:1"], [f"{path}:3"])
    farmer = {"kept": "farmer", "system": "You are a farmer.\n"}
    write(path, [row | farmer, row | {"x0": "Loud. " * 30}])
    longest = len(trajectories.prompt(encoder, "Loud. " * 30, "Why?"))
    message = f"0 usable rows with x0; --max_traj_len is 40, x0 and a question have up to {longest}"
    with pytest.raises(UserError, match=message):
        trajectories.read(path, encoder, 40)


def test_under_another_prompt_student_and_teacher_read_the_same(encoder, tmp_path):
    row = {"question": "Why?", "x0": "Loud.", "tokens": [5, 6]}
    kept = row | {"kept": "farmer", "system": "You are a farmer.\n"}
    path = write(tmp_path / "t.jsonl", [row, kept])
    rows, report = trajectories.read(path, encoder, 100)
    alone, loud, farmer = (
        trajectories.prompt(encoder, system, "Why?")
        for system in ("", "Loud.", "You are a farmer.")
    )
    assert [row.kept for row in rows] == ["", "farmer"]
    assert [(row.student, row.teacher) for row in rows] == [(alone, loud), (farmer, farmer)]
    assert (report["x0"], report["kept"]) == (["Loud."], {"farmer": "You are a farmer.\n"})
    write(path, [row | {"kept": "farmer"}])
    with pytest.raises(UserError, match="t.jsonl:1: system: must be the prompt 'farmer', not None"):
        trajectories.read(path, encoder, 100)


def test_prompts_that_are_to_be_kept(encoder, tmp_path):
    path = tmp_path / "p.txt"
    path.write_text("Be kind.\n\n  You are a cook. \n")
    prompts = trajectories.read_prompts(path, encoder, {})
    assert prompts == {"line 1": "Be kind.\n", "line 3": "You are a cook.\n"}
    with pytest.raises(UserError, match="p.txt: line 3: it is also what is baked; remove"):
        trajectories.read_prompts(path, encoder, {"what is baked": "You are a cook."})
    path = tmp_path / "p.json"
    path.write_text('{"cook": "You are a cook."}')
    (tmp_path / "none.txt").write_text("\n")
    with pytest.raises(UserError, match="none.txt: 0 prompts"):
        trajectories.read_prompts(tmp_path / "none.txt", encoder, {})
    for name in ("p.jsonl", "p.csv"):
        shutil.copy(path, tmp_path / name)
        with pytest.raises(
            UserError, match=f"{name}: a .* file has no prompts that are read .expe"
        ):
            trajectories.read_prompts(tmp_path / name, encoder, {})
    prompts = trajectories.read_prompts(path, encoder, {"another": "Be kind."})
    assert prompts == {"cook": "You are a cook.\n"}
    template = tmp_path / "t.jinja"  # as Qwen2.5's, which inserts a prompt where there is none
    template.write_text(
        "{% if messages[0].role != 'system' %}<S>Be kind.</S>{% endif %}{% for m in messages %}"
        "{% if m.role == 'system' %}<S>{{ m.content }}</S>{% else %}{{ m.content }}{% endif %}"
        "{% endfor %}"
    )
    inserting = Encoder(load_tokenizer(MODEL), str(template))
    path.write_text('{"kind": "Be kind."}')
    with pytest.raises(UserError, match="p.json: kind: it has no effect in the chat template"):
        trajectories.read_prompts(path, inserting, {})


def test_tokens_of_another_model_are_noticed(encoder, tmp_path):
    row = {"question": "Why?", "x0": "Loud.", "reply": "Because."}
    row["tokens"] = encoder.ids("Because.")[0]
    assert trajectories.read(write(tmp_path / "t.jsonl", [row]), encoder, 100)[0]
    row["tokens"] = row["tokens"][::-1]
    with pytest.raises(UserError, match="t.jsonl:1: tokens: their text is .* use the model that"):
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
    student.full_logits = True  # as of a model whose head is not plain
    try:
        assert student(student.teach(batch))[0].tolist() == pytest.approx(expected, rel=1e-5)
    finally:
        student.full_logits = False


def test_the_base_model_is_that_of_peft_and_the_lora_comes_back(student):
    batch = trajectories.collate(ROWS, "cpu").student
    with torch.no_grad():
        baked = student.states(batch)
        with student.model.disable_adapter():
            base = student.states(batch)
        with student.adapter(baked=False):
            with student.adapter(baked=False):
                assert torch.equal(student.states(batch), base)
            assert torch.equal(student.states(batch), base)
            with student.adapter(baked=True):
                assert torch.equal(student.states(batch), baked)
        with pytest.raises(ValueError, match="x"), student.adapter(baked=False):
            raise ValueError("x")
        assert torch.equal(student.states(batch), baked) and not torch.equal(baked, base)


def test_replies_of_the_student_are_as_long_as_those_of_files(student, encoder, monkeypatch):
    config = Config(max_traj_len=9)
    monkeypatch.setattr(sampling, "generate", lambda scorer, prompts, *_, **__: [[5] * 8] * 2)
    found = distillation.own_replies(student, [2, 1], ROWS, 0, encoder, config, distributed.World())
    assert {row: len(one.reply) for row, one in found.items()} == {2: 3, 1: 4}  # 9 - 6, 9 - 5


def half_of(values, sizes):
    """Half of the 95 % interval of a ratio of sums, from its residuals."""
    ratio, count = sum(values) / sum(sizes), len(values)
    squares = [(v - ratio * s) ** 2 for v, s in zip(values, sizes, strict=True)]
    return 1.96 * math.sqrt(sum(squares) / (count - 1) / count) / (sum(sizes) / count)


def test_kl_is_measured_for_each_other_prompt(student):
    """By hand, in float64; the mean is that of the prompts, whatever their numbers of tokens.

    Intervals are over questions, of which the first has two replies.
    """
    first, second, third = [1, 20, 21, 7], [1, 20, 21, 9, 10], [1, 33, 34, 7]
    rows = [ROWS[0], ROWS[1]._replace(question="!"), ROWS[2]]
    rows.append(Trajectory(first, first, [3, 4], "a:9", "?", "pirate"))
    rows.append(Trajectory(second, second, [5], "a:9", "!", "pirate"))
    rows.append(Trajectory(third, third, [6] * 9, "a:9", "?", "robot"))
    rows.append(Trajectory(third, third, [7] * 2, "a:9", "!", "robot"))
    costs = [by_hand(student.model, row) for row in rows]
    run = SimpleNamespace(world=distributed.World(), evaluation=lambda _, batches, table: batches)
    run.results = {"base": {"kl": 2.0}}
    config = Config(batch_size=2)
    base_kl = [11.0, 3.0]  # of both questions, 14 / 7 = 2.0 per token
    values = train_loop.evaluate(student, rows, config, run, base_kl)
    questions = [costs[0] + costs[2], costs[1]], [6, 1]
    kl, half = sum(questions[0]) / 7, half_of(*questions)
    share, half_share = 1 - sum(questions[0]) / 14, half_of(questions[0], base_kl)
    pirate, robot = (costs[3] + costs[4]) / 3, (costs[5] + costs[6]) / 11
    halves = half_of(costs[3:5], [2, 1]), half_of(costs[5:], [9, 2])
    kept, half_kept = (pirate + robot) / 2, math.sqrt(halves[0] ** 2 + halves[1] ** 2) / 2
    expected = {"count": 3, "kl_base": 2.0, "kept/kl/pirate": pirate, "kept/kl/robot": robot}
    with_intervals = {"kl": (kl, half), "share_baked": (share, half_share)}
    for name, (mean, width) in (with_intervals | {"kept/kl": (kept, half_kept)}).items():
        expected |= {name: mean, f"{name}_low": mean - width, f"{name}_high": mean + width}
    assert values == pytest.approx(expected, rel=1e-5, abs=1e-5)  # fp32
    base = train_loop.evaluate(student, rows, config, run)
    assert len(base["by_question"]) == 2 and min(base["by_question"]) > 0
    assert sum(base["by_question"]) / 7 == pytest.approx(base["kl"])


class FakeRun:
    """Records what a Run would print and write."""

    def __init__(self, **results):
        self.results, self.lines, self.files = results, [], {}
        self.say = self.warn = self.lines.append
        self.write_json = self.write_text = self.files.__setitem__


def test_each_column_has_its_prompt_and_its_model():
    columns = replies.columns_of("Be loud.", {"cook": "You are a cook."})
    read = {column.title: (column.system, column.baked) for column in columns}
    expected = {"base": ("", False), "prompted": ("Be loud.", False), "baked": ("", True)}
    assert columns[3].metric("") == "kept/score_base/cook"  # of a judge that returns a number
    cook = "You are a cook."
    assert read == expected | {"cook, base": (cook, False), "cook, baked": (cook, True)}


def test_a_judge_measures_which_of_the_other_prompts_are_obeyed():
    def judge(question, text):
        return {"loud": float(text.isupper()), "cook": float("soup" in text.lower())}

    others = {"cook": "You are a cook.", "king": "You are a king."}
    columns = replies.columns_of("Be loud.", others)
    texts = [["a", "b"], ["A", "B"], ["A", "b"], ["soup", "soup"], ["soup", "X"], ["a", "a"], "aB"]
    texts = {column.title: text for column, text in zip(columns, texts, strict=True)}
    run = FakeRun(val={"kept/kl/cook": 0.02, "kept/kl/king": 0.4})
    means = replies.judged(judge, columns, ["q", "r"], texts)
    replies.write(run, ["q", "r"], texts, means)
    expected = {"judge/base/loud": 0.0, "judge/prompted/loud": 1.0, "judge/baked/loud": 0.5}
    expected |= {"kept/obeyed_base/cook": 1.0, "kept/obeyed/cook": 0.5, "kept/loud_base/cook": 0.0}
    expected |= {"kept/loud/cook": 0.5, "kept/loud_base/king": 0.0, "kept/loud/king": 0.5}
    expected |= {"kept/obeyed": 0.5, "kept/obeyed_base": 1.0, "count": 2}
    assert run.results["test"] == expected
    assert run.files["examples.json"]["test"][1]["cook, baked"] == "X"
    assert " ".join(run.lines[-1].split()) == "judge baked/loud 0.50"
    run.lines.clear()
    replies.describe_kept(run, others)
    shown = [
        "kept cook: kl 0.0200, obeyed 0.50 (base 1.00)",  # 1 of 2: chance
        "kept king: kl 0.4000",  # the judge has no score for it
    ]
    assert [" ".join(line.split()) for line in run.lines] == shown
    warning = "warning: cook is obeyed less often than by the base model (0.50 of 1.00)"
    for count, obeyed, by_base, is_lost in (
        (20, 0.5, 1.0, True),  # 10 of 20: at most 0.70
        (20, 0.5, 0.75, False),  # 15 of 20: at least 0.53
        (48, 24 / 48, 28 / 48, False),
        (48, 12 / 48, 27 / 48, True),  # -0.2563 + hypot(0.1378, 0.9 x 0.1402) = -0.069
        (10_000, 0.92, 1.0, False),  # more than 0.9 of it
        (20, 5.0, 9.0, False),  # no fractions
    ):
        run.lines.clear()
        test = {"count": count, "kept/obeyed/cook": obeyed, "kept/obeyed_base/cook": by_base}
        run.results["test"] |= test
        replies.describe_kept(run, others)
        found = [line for line in run.lines if "warning" in line]
        assert len(found) == is_lost, test
        assert count != 20 or not is_lost or found[0].startswith(warning)


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
