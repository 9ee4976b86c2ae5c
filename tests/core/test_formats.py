"""Preference files of seven kinds -> examples: hand-written rows, whole files, malformed rows."""

import csv
import json
import math
import time

import pytest

import reading
from conftest import ROOT
from ddp_utils import UserError, cli, data
from ddp_utils.data import Record, Unusable
from lm import chat_template, message_texts, preference_data
from lm.chat_template import Encoder
from lm.models import load_tokenizer

WHERE = "f.jsonl:7"
TEXT = {"chosen": "x", "rejected": "y"}


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


SYSTEM = {"role": "system", "content": "s"}


def read(row, name=None):
    """(prompt, chosen, rejected) of a row, or the reason why it is unusable."""
    record = preference_data.pairs_of(data.Record(WHERE, row))[0]
    try:
        return preference_data.texts_of(record, name or preference_data.find_format(record).name)
    except Unusable as reason:
        return str(reason)


def error_of(row, name=None):
    with pytest.raises(UserError) as caught:
        read(row, name)
    message = str(caught.value)
    assert message.startswith(f"{WHERE}: ") and "\n" not in message and len(message) < 300
    return message.removeprefix(f"{WHERE}: ")


# --- files of each format ------------------------------------------------------------------------

FILES = json.loads((ROOT / "tests/data/formats_expected.json").read_text())
FORMATS = [*preference_data.FIELDS, "messages", "transcript"]


@pytest.mark.parametrize("file", FILES)
def test_each_format_is_found_and_read_as_written_by_hand(file):
    found = list(data.read(ROOT / "tests/data/formats" / file))
    name = preference_data.find_format(found[0]).name
    assert name == file.partition(".")[0]
    rows = [read(record.data, name) for record in found]
    assert [row if isinstance(row, str) else [*row] for row in rows] == FILES[file]
    assert {name.partition(".")[0] for name in FILES} == {*FORMATS}


# --- the fields decide about the format -----------------------------------------------------------


NAMED = [
    ({"prompt": "a", "chosen": "b", "rejected": "c"}, "prompt"),
    ({"prompt": 3, "chosen": None, "rejected": {}}, "prompt"),
    ({"prompt": "a", "instruction": "i", "chosen": "b", "rejected": "c"}, "prompt"),
    ({"instruction": "a", "chosen": "b", "rejected": "c"}, "instruction"),
    ({"question": "a", "chosen": "b", "rejected": "c"}, "question"),
    ({"prompt": "a", "question": "a", "chosen": [], "rejected": []}, "messages"),
    ({"prompt": [], "chosen": "b", "rejected": "c"}, "messages"),
    ({"chosen": [], "rejected": []}, "messages"),
    ({"conversations": [], "chosen": {}, "rejected": {}}, "sharegpt"),
    ({"chosen": "\n\nHuman: a", "rejected": 3}, "transcript"),
    ({"input": {}, "preferred_output": [], "non_preferred_output": []}, "openai"),
]


def test_the_fields_tell_the_format():
    for row, name in NAMED:
        assert preference_data.find_format(data.Record(WHERE, row)).name == name
        assert (
            preference_data.find_format(data.Record(WHERE, dict(reversed(row.items())))).name
            == name
        )


def test_fields_that_are_null_do_not_tell_the_format(tmp_path):
    """A table has the fields of all its rows, such as of two sets that were joined."""
    encoder = Encoder(load_tokenizer("data/demo/model"))
    talk = [user("q"), assistant("x")]
    for row, name in (
        ({"prompt": None, "question": "q", **TEXT}, "question"),
        ({"prompt": "q", "conversations": None, **TEXT}, "prompt"),
        ({"instruction": None, "output": None, "messages": talk}, "messages"),
    ):
        (tmp_path / "f.jsonl").write_text(json.dumps(row))
        reader = reading.texts if "messages" in row else reading.pairs
        assert reader(tmp_path / "f.jsonl", encoder)[1]["format"] == name


def test_a_file_of_another_format_cannot_be_skipped(tmp_path):
    encoder = Encoder(load_tokenizer("data/demo/model"))
    for row, says in (
        (TEXT, "; if both replies begin with the prompt, write it in a field of its own"),
        ({"context": [], "completions": []}, "NeMo-RL (expected prompt, chosen, rejected or an"),
    ):
        (tmp_path / "f.jsonl").write_text(json.dumps(row))
        with pytest.raises(UserError) as caught:
            reading.pairs(tmp_path / "f.jsonl", encoder)
        assert says in str(caught.value) and "--on_bad_record" not in str(caught.value)


# --- which response is better ---------------------------------------------------------------------

WRONG = [  # fields of public data sets whose rows prefer either of two responses
    {"labels": 0, "score_A": 3, "score_B": 9},  # SHP
    {"winner": "model_b"},  # Chatbot Arena
    {"better_response_id": 1},  # PKU-SafeRLHF
    {"overall_preference": -2},  # HelpSteer3
    {"preference_strength": 1},  # HelpSteer2
    {"score_0": "0.5", "score_1": "-0.5"},  # WebGPT, from CSV
    {"choice": 1},  # summaries from feedback
    {"preference": 2},  # AlpacaFarm
    {"conv_A_rating": 1.0, "conv_B_rating": 3.0},  # Unified-Feedback
    {"score_chosen": 8.0, "score_rejected": 8.5},  # UltraFeedback
    {"chosen-rating": "9", "rejected-rating": "10"},
    {"preferred_response": "b"},
    {"score": -1},
    {"label": False},  # KTO
    {"kto_tag": False},  # LLaMA-Factory
    {"label": 1},  # the number of the better response
    {"reward_margin": -2},
    {"score_difference": -0.5},
    {"chosen_helpfulness": 1, "rejected_helpfulness": 4},
    {"Chosen_Score": 1.5, "Rejected_Score": 2},
    {"scores": {"chosen": 1, "rejected": 9}},
    {"overall_pref": "B-is-clearly-better"},  # MultiPref
    {"better_idx": 0},
    {"scoreChosen": 1, "scoreRejected": 5},
    {"chosen_judge_score": 1, "rejected_judge_score": 5},
    {"reward_gap": -3},
    {"winner": " Rejected "},
    {"response1_score": 2, "response2_score": 1},
    {"chosen-avg-rating": 3, "rejected_avg_rating": 4},
    {"preferred": "rejected"},
    {"chosen_is_better": False},
    {"chosen_rank": 2, "rejected_rank": 1},
    {"rank_chosen": 3, "rank_rejected": 1},
    {"chosen_win_rate": 0.1, "rejected_win_rate": 0.9},
    {"reward": {"chosen": 1, "rejected": 2}},
]
OTHER = [  # fields whose names do not mean that one response is better
    {"chosen_ppl": 9.5, "rejected_ppl": 3.5},
    {"chosen_year": 1990, "rejected_year": 2020},
    {"chosen_rank": 1, "rejected_rank": 4},
    {"chosen_tokens": 5, "rejected_tokens": 9},
    {"reference_chosen_logps": -9.5, "reference_rejected_logps": -3.5},
    {"chosen_model": "b", "model_b": "b", "best_answer": "b"},
    {"lengths": {"chosen": 1, "rejected": 9}},
    {"reward": -1.5},  # of a reward model, in which 0 has no meaning
    {"label_source": "b", "winners": "b"},
]
RIGHT = [{"score_chosen": 8.5, "score_rejected": 8.5}, {"chosen_score": 5}, {"margin": math.nan}]
RIGHT += [
    {"score": 0.7},
    {"preference": " Chosen"},
    {"label": True},
    {"label": "chosen"},
    {"labels": ["math"]},
    {"margin": 0.0, "score": 0},  # a tie
    {"preference": "The user likes responses that are concise."},
    {"scores": {"chosen": 9, "rejected": 1}},
    {"Chosen-Rating": "10", "rejected_rating": 9},
    {"ignored_winner": "b"},
    {"score": None},
    {"chosen_is_better": 1},
    {"preferred": "yes", "better": "A"},
]


@pytest.mark.parametrize("more", WRONG, ids=str)
def test_a_field_that_prefers_the_other_response_is_an_error(more, tmp_path):
    row = {"prompt": "q", **TEXT, **more}
    assert error_of(row).startswith(f"{next(iter(more))}: ")
    (tmp_path / "f.jsonl").write_text(json.dumps(row))
    encoder = Encoder(load_tokenizer("data/demo/model"))
    for reader in (reading.pairs, reading.texts):
        with pytest.raises(UserError, match=f"f.jsonl:1: {next(iter(more))}: "):
            reader(tmp_path / "f.jsonl", encoder)
    columns = [f"ignored_{name.replace('-', '_')}={name}" for name in more]
    assert f"use --columns {columns[0]}" in error_of(row)
    columns = ",".join(columns)
    assert cli.COLUMNS.fullmatch(columns)
    assert len(reading.pairs(tmp_path / "f.jsonl", encoder, columns=columns)[0]) == 1


@pytest.mark.parametrize("more", OTHER, ids=str)
def test_other_fields_are_accepted_and_listed_as_not_read(more, tmp_path):
    (tmp_path / "f.jsonl").write_text(json.dumps({"prompt": "q", **TEXT, **more}))
    encoder = Encoder(load_tokenizer("data/demo/model"))
    for reader in (reading.pairs, reading.texts):
        rows, report = reader(tmp_path / "f.jsonl", encoder)
        assert (len(rows), report["fields_not_read"]) == (1, ", ".join(sorted(more)))


def test_a_field_with_the_name_of_a_weight_can_be_ignored(tmp_path):
    """It may be the name of a split, of a topic, or of a loss."""
    encoder = Encoder(load_tokenizer("data/demo/model"))
    for name in chat_template.WEIGHTS:
        (tmp_path / "f.jsonl").write_text(json.dumps({"prompt": "q", **TEXT, name: "train"}))
        for reader in (reading.pairs, reading.texts):
            with pytest.raises(UserError, match=f"f.jsonl:1: {name}: ") as caught:
                reader(tmp_path / "f.jsonl", encoder)
            columns = f"ignored_{name}={name}"
            assert f"use --columns {columns} to ignore this field" in str(caught.value)
            assert len(reader(tmp_path / "f.jsonl", encoder, columns=columns)[0]) == 1


def test_a_value_that_pandas_writes_as_nan_is_absent(tmp_path):
    names = ("winner", "label", "weight", "system", "preference_strength", "images", "tools")
    rows = [{"prompt": "q", **TEXT, name: math.nan} for name in names]
    (tmp_path / "f.jsonl").write_text("\n".join(map(json.dumps, rows)))
    encoder = Encoder(load_tokenizer("data/demo/model"))
    assert len(reading.pairs(tmp_path / "f.jsonl", encoder)[0]) == len(names)


def test_responses_that_are_numbers_are_no_scores():
    """The answer 2 may be better than 11."""
    assert read({"prompt": "1+1?", "chosen": "2", "rejected": "11"}) == ("1+1?", "2", "11")


def test_a_field_that_prefers_the_chosen_response_is_accepted():
    for more in RIGHT:
        assert read({"prompt": "q", **TEXT, **more}) == ("q", "x", "y")


def test_answers_are_those_of_nectar_only_beside_a_prompt():
    for row, is_nectar in (
        ({"prompt": "q", "answers": [{"answer": "a", "rank": 1}]}, True),
        ({"context": "c", "question": "q", "answers": {"text": ["a"]}}, False),  # SQuAD
    ):
        error = preference_data.unknown_format(Record("f.jsonl:1", row), "prompt")
        assert ("Nectar" in str(error)) == is_nectar


# --- texts ---------------------------------------------------------------------------------------


def test_texts_are_not_changed_and_a_system_text_makes_messages_of_the_prompt():
    row = {"prompt": " a\n", "chosen": "  b \n", "rejected": "\tc"}
    assert read(row) == (" a\n", "  b \n", "\tc")
    for name in ("prompt", "instruction", "question"):
        row = {name: " a", "system": "s ", "chosen": "b", "rejected": "c"}
        assert read(row) == ([{**SYSTEM, "content": "s "}, user(" a")], "b", "c")
        assert read({"system_prompt" if x == "system" else x: row[x] for x in row}) == read(row)
    both = {"prompt": "a", "system": "s", "system_prompt": "t", **TEXT}
    assert error_of(both) == "system_prompt: there is also system; remove one"
    row = {"instruction": "a", "history": [["q", "r"]], **TEXT}  # LLaMA-Factory
    assert read(row) == ([user("q"), assistant("r"), user("a")], "x", "y")
    for nothing in (None, "", " \n"):
        row = {"instruction": "a", "system": nothing, "input": nothing, **TEXT}
        assert read(row) == ("a", "x", "y")


# --- messages ------------------------------------------------------------------------------------

LONG = [SYSTEM, user("1"), assistant("2"), user("3")]


WHOLE = {"chosen": [*LONG, assistant("x")], "rejected": [*LONG, assistant("y")]}


def test_many_ways_to_write_one_conversation_give_one_example():
    for row in (
        {"prompt": LONG, "chosen": [assistant("x")], "rejected": [assistant("y")]},
        {"prompt": LONG, "chosen": "x", "rejected": "y"},
        {"prompt": LONG, "chosen": [assistant("x")], "rejected": "y"},
        {"prompt": LONG, "chosen": assistant("x"), "rejected": assistant("y")},
        WHOLE,
        {"prompt": "3", **WHOLE},
        {"prompt": None, **WHOLE},
        {"prompt": LONG, **WHOLE, "rejected": [assistant("y")]},
        {"prompt": LONG[:2], **WHOLE},
        {"prompt": LONG[1:2], "system": "s"}
        | {"chosen": [*LONG[2:], assistant("x")], "rejected": [*LONG[1:], assistant("y")]},
    ):
        assert read(row) == (LONG, "x", "y")
    row = {"system": "s", "prompt": "q", "chosen": [assistant("x")], "rejected": "y"}
    assert read(row) == ([SYSTEM, user("q")], "x", "y")


def test_fields_that_are_not_read_are_named(tmp_path):
    marked = {**user("1"), "name": "Ann", "weight": 0, "tool_calls": None}
    chosen = {**assistant("x"), "weight": 1, "train": True}
    row = {"prompt": [marked], "chosen": [chosen], "rejected": [assistant("y")]}
    assert read(row) == ([user("1")], "x", "y")
    row |= {"label": True, "loss": None, "metadata": {"source": "web"}, "sytem": "s", "tags": []}
    (tmp_path / "f.jsonl").write_text(json.dumps(row))
    encoder = Encoder(load_tokenizer("data/demo/model"))
    pairs, report = reading.pairs(tmp_path / "f.jsonl", encoder)
    assert len(pairs) == 1 and report["fields_not_read"] == "metadata, sytem"


def test_fields_of_messages_that_are_not_read_are_named(tmp_path):
    """A reply whose mask is 0 is not trained."""
    turns = [user("1"), {**assistant("bad"), "loss_mask": 0, "votes": 3}, user("2"), assistant("x")]
    (tmp_path / "f.jsonl").write_text(json.dumps({"messages": turns}))
    tokenizer = load_tokenizer("data/demo/model")
    [text], report = reading.texts(tmp_path / "f.jsonl", Encoder(tokenizer))
    assert report["fields_not_read"] == "messages[].votes"
    assert "bad" in tokenizer.decode(text.prompt) and "bad" not in tokenizer.decode(text.reply)


def test_fields_that_another_format_reads_are_a_warning(tmp_path):
    row = {"prompt": "q", **TEXT, "history": [["a", "b"]], "id": 1}
    (tmp_path / "f.jsonl").write_text(json.dumps(row))
    _, report = reading.pairs(tmp_path / "f.jsonl", Encoder(load_tokenizer("data/demo/model")))
    lines = preference_data.describe_all({"train": report}, {"val": [1]})
    assert lines[0].endswith("not read: history, id")
    assert lines[1].startswith("warning: train: history: not read in the format prompt; if they ")
    assert len(lines) == 2


def test_conversations_that_differ_before_the_last_message_are_unusable():
    first = [user("1"), assistant("x")]
    for chosen, rejected in (
        (first, [user("2"), assistant("y")]),
        (first, [SYSTEM, user("1"), assistant("y")]),
        (first, [*first, user("2"), assistant("y")]),
        ([*first, user("2"), assistant("x")], [user("1"), *LONG[2:], assistant("y")]),
    ):
        assert read({"prompt": "1", "chosen": chosen, "rejected": rejected}) == "prompts differ"
        assert read({"chosen": chosen, "rejected": rejected}) == "prompts differ"
        assert read({"chosen": rejected, "rejected": chosen}) == "prompts differ"
    steps = {side: [assistant(side), user("2"), assistant("x")] for side in TEXT}
    differ = "turns before the last reply differ"  # as in trajectories with tools
    assert read({"prompt": [user("1")], **steps}) == differ
    whole = {"chosen": first, "rejected": [user("1"), assistant("y")]}
    assert read({"prompt": [user("2")], **whole}) == "prompts differ"
    assert read({"prompt": [SYSTEM, user("1")], **whole}) == "prompts differ"
    assert read({"prompt": "1", **whole}) == ([user("1")], "x", "y")
    assert read({"prompt": "2", **whole}) == "prompts differ"  # its text would be lost


@pytest.mark.parametrize("write", [json.dumps, str])
@pytest.mark.parametrize("role", ["model", "AI", "bot", "chatgpt", "assistant"])
def test_a_reply_that_is_the_text_of_a_message_is_read_or_an_error(role, write):
    """The roles are those that messages may have; Python's text is an error (see above)."""
    sides = {side: write([{"role": role, "content": text}]) for side, text in TEXT.items()}
    row = {"prompt": json.dumps([{"from": "Human", "value": "q"}]), **sides}
    for prompt in (row["prompt"], "q"):
        if write is str:
            with pytest.raises(
                UserError, match="^f.jsonl:7: chosen: a text of messages that is not"
            ):
                message_texts.check_not_python(Record(WHERE, row), "chosen")
        else:
            assert read({**row, "prompt": prompt}) == ([user("q")], "x", "y")


def test_parts_of_a_content_may_be_a_list_or_its_text():
    """A column of a table has one type, so some data sets have the text of the list."""
    parts = {side: [{"type": "text", "text": text}] for side, text in TEXT.items()}
    texts = {side: json.dumps(value) for side, value in parts.items()}
    for sides in (parts, texts):
        turns = {side: [assistant(value)] for side, value in sides.items()}
        for row in (sides, turns):
            assert read({"prompt": "q", **row}) == ([user("q")], "x", "y")
    row = {"instruction": "q", "input": texts["chosen"], **TEXT}
    assert read(row) == (f"q\n{texts['chosen']}", "x", "y")  # a text of Alpaca
    results = [user("q"), assistant("?"), {"role": "tool", "content": texts["chosen"]}]
    prompt, *_ = read({"prompt": results, **TEXT})
    assert prompt[-1]["content"] == texts["chosen"]  # of a tool, whose format it is


STAY = [  # texts that only resemble messages
    '{"type": "text", "text": "x"}',  # of programs that write JSON: a bot, a document
    '[{"type": "text", "text": "x"}, {"type": "button", "text": "y"}]',
    '[{"type": "text", "text": "x", "color": "red"}]',
    '{"type": "doc", "content": [{"type": "a", "content": [{"type": "text", "text": "x"}]}]}',
    "[{'type': 'text', 'text': 'x'}]\n[{'type': 'text', 'text': 'y'}]",
    "[a link](https://a.b) to {x}",
    "[1, 2]",
    '["role", "user"]',
    "[{'x': 1}]",
    '[{"name": "Ann", "role": "user"}]',
    '{"role": "CEO", "content": "Pay me."}',
    '[{"role": "Hamlet", "content": "To be"}]',
    '[{"from": "Paris", "to": "Rome"}]',
    "[{'from': 'a', 'to': 'b', 'value': 3}]",
    '[{"role": "user", "content": "hi"}] Who is this?',
    '{"users": [{"role": "user", "content": "hi"}]}',
    "{% for m in messages %}[{'role': 'user', 'content': m}]{% endfor %}",
    "```\n[{'role': 'user', 'content': 'hi'}]\n```",
    " " * 100_000 + "[",
]


@pytest.mark.parametrize("text", STAY, ids=range(len(STAY)))
def test_a_text_that_only_resembles_messages_stays_a_text(text, tmp_path):
    (tmp_path / "f.jsonl").write_text(json.dumps({"prompt": "q", "chosen": text, "rejected": "y"}))
    [pair], report = reading.pairs(tmp_path / "f.jsonl", Encoder(load_tokenizer("data/demo/model")))
    assert (pair.expected, report["format"]) == (text, "prompt")


def test_a_response_may_be_the_json_text_of_messages_and_tools(tmp_path):
    """In this way they are one column of a table."""
    tokenizer = load_tokenizer("data/demo/model")
    tokenizer.chat_template = "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
    encoder = Encoder(tokenizer)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    texts = {side: json.dumps({"messages": turns, "tools": tools}) for side, turns in WHOLE.items()}
    rows = {
        "a": {**WHOLE, "tools": tools},
        "b": texts,
        "c": {k: json.loads(v) for k, v in texts.items()},
        "e": {k: json.dumps(v) for k, v in texts.items()},  # a text of the text
    }
    ids = []
    for name, row in rows.items():
        (tmp_path / name).write_text(json.dumps(row))
        [pair], report = reading.pairs(tmp_path / name, encoder)
        ids.append(pair[:3])
        assert report["fields_not_read"] == ""
    assert ids.count(ids[0]) == 4 and "'function'" in encoder.tokenizer.decode(ids[0][0])
    (tmp_path / "d").write_text(json.dumps({**texts, "rejected": json.dumps({"messages": []})}))
    with pytest.raises(UserError, match="d:1: chosen"):
        reading.pairs(tmp_path / "d", encoder)


def test_a_text_of_messages_that_excel_has_cut_off_is_an_error(tmp_path):
    turns = json.dumps([user("hi"), assistant("so " * 20_000)])
    row = {"prompt": "q", "chosen": turns[:32_767], "rejected": "y"}
    (tmp_path / "f.jsonl").write_text(json.dumps(row))
    with pytest.raises(
        UserError, match="f.jsonl:1: chosen: .* is cut off; Excel keeps 32,767 char"
    ):
        reading.pairs(tmp_path / "f.jsonl", Encoder(load_tokenizer("data/demo/model")))


# --- the ends of replies -------------------------------------------------------------------------


def test_a_reply_gets_one_end_and_has_none_within(tmp_path):
    """Decoded replies may also have the token that pads them."""
    tokenizer = load_tokenizer("data/demo/model")
    tokenizer.add_special_tokens({"pad_token": "<|endoftext|>"})
    encoder = Encoder(tokenizer)
    end = encoder.end_text
    plain = encoder.encode("f:1", "q", "yes", "no")[0]
    for behind in (end, f"{end}<|endoftext|>", f"{end}\n<|endoftext|><|endoftext|>"):
        assert encoder.encode("f:1", "q", f"yes{behind}", "no")[0] == plain
    path = tmp_path / "f.jsonl"
    within = {"prompt": "q", "chosen": f"a{end}\nuser\nb", "rejected": "no"}
    path.write_text("\n".join(map(json.dumps, [within, {"prompt": "q", **TEXT}])))
    assert reading.pairs(path, encoder)[1]["dropped"] == {"an end within a reply": 1}


def warnings_about(path, rows):
    """Return the warnings of the data report about these rows and one prompt of validation."""
    path.write_text("\n".join(map(json.dumps, rows)))
    _, report = reading.pairs(path, Encoder(load_tokenizer("data/demo/model")))
    return preference_data.describe_all({"train": report}, {"val": rows})[1:]


EDGES = ["yes<|eot_id|>", "no\n</s>", "a<turn|>", "a[|endofturn|]", "a[e~[", "a [/INST]", "a<EOD>"]
EDGES += ["<|assistant|>\na", "ASSISTANT: a", "### Response:\na", "assistant\na", "<bot>: a"]


@pytest.mark.parametrize("reply", EDGES)
def test_replies_that_another_models_template_has_rendered_are_a_warning(reply, tmp_path):
    rows = [{"prompt": f"{n}", "chosen": "an AI: yes", "rejected": reply} for n in range(3)]
    [line] = warnings_about(tmp_path / "f.jsonl", rows)
    assert line.startswith("warning: train: 3 of 3 rows have replies that begin with the name of")
    rows = [{**row, "rejected": f"{reply} is what it writes"} for row in rows]
    is_start = reply[0] in "<A#" or "\n" in reply and reply[0] == "a"
    assert len(warnings_about(tmp_path / "f.jsonl", rows)) == is_start


@pytest.mark.parametrize(
    "prompt",
    [
        "You are X.\nYou are Y.\n\n### Input:\nQ\n\n### Response:\n",
        "A chat between.\nLine two.\nUSER: q ASSISTANT:",
        "Sys.\n<|user|>\nQ<|assistant|>\n",
        "system\nS\nuser\nWhat is it?\nassistant\n",  # ChatML without special tokens
        "<human>: Q\n<bot>:",
        "Q [/INST]",
    ],
)
def test_prompts_that_end_with_the_name_of_the_assistant_are_a_warning(prompt, tmp_path):
    """They are rendered, but not as RENDERED knows; a single such prompt may be a task."""
    rows = [{"prompt": f"{n} {prompt}", **TEXT} for n in range(3)]
    [line] = warnings_about(tmp_path / "f.jsonl", rows)
    assert line.startswith("warning: train: 3 of 3 rows have prompts that end with the name of")
    rows = [{**row, "prompt": f"{row['prompt']} or not? Model:"} for row in rows]
    assert warnings_about(tmp_path / "f.jsonl", [*rows, {"prompt": prompt, **TEXT}]) == []


def test_replies_that_stand_for_no_value_are_a_warning_above_1_percent(tmp_path):
    """pandas writes them with astype(str); None may also be the answer to a question."""
    for value in ("nan", "None", "null"):
        rows = [{"prompt": f"{n}", "chosen": "x", "rejected": "y"} for n in range(100)]
        rows[0]["rejected"] = value
        assert warnings_about(tmp_path / "f.jsonl", rows) == []
        rows[1]["chosen"] = value
        [line] = warnings_about(tmp_path / "f.jsonl", rows)
        assert line.startswith("warning: train: 2 rows have nan, None or null as a reply; remove")
    row = {"instruction": "q", **TEXT}
    for value in ("nan", "<noinput>", "", None):
        assert read({**row, "input": value}) == ("q", "x", "y")
    for value in ("nano", "null"):  # null may be what is asked about
        assert read({**row, "input": value}) == (f"q\n{value}", "x", "y")


def test_a_system_text_that_the_messages_repeat_is_there_once():
    turns = [{"role": "system", "content": "S "}, user("q")]
    rows = [{"prompt": turns, "chosen": "x", "rejected": "y"}]
    rows += [{"chosen": [*turns, assistant("x")], "rejected": [*turns, assistant("y")]}]
    for row in rows:
        assert read({**row, "system": "S"}) == read(row) == (turns, "x", "y")
        assert error_of({**row, "system": "T"}).startswith("system: the messages begin with anot")


def test_a_template_whose_tokens_the_tokenizer_lacks_is_a_warning(capsys):
    """The template of a chat model, with the tokenizer of a base model: replies get its end."""
    tokenizer = load_tokenizer("data/demo/model")
    tokenizer.chat_template = tokenizer.chat_template.replace("im_end", "im_stop")
    encoder = Encoder(tokenizer)
    assert (encoder.end_text, encoder.end) == ("", tokenizer.eos_token_id)
    says = "warning: --chat_template writes <|im_stop|> behind a reply, which is no token of this"
    assert says in capsys.readouterr().out
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    assert Encoder(tokenizer).end_text == "" and capsys.readouterr().out == ""


@pytest.mark.parametrize("write", [json.dumps, str])
def test_the_text_of_a_list_as_prompt_or_rejected_reply_is_a_warning(write, tmp_path):
    """A CSV has no lists; where both replies are lists, the task may be to write one.

    In the data of Chatbot Arena all three are the JSON of lists.
    """
    encoder = Encoder(load_tokenizer("data/demo/model"))

    def lines_of(chosen, prompt="q"):
        rows = [(f"{prompt}{n}", chosen, write(["no", "it's not"])) for n in range(3)]
        rows = [(write([row[0]]) if prompt == "Arena" else row[0], *row[1:]) for row in rows]
        with open(tmp_path / "f.csv", "w", newline="") as file:
            csv.writer(file).writerows([("prompt", "chosen", "rejected"), *rows])
        _, report = reading.pairs(tmp_path / "f.csv", encoder)
        return preference_data.describe_all({"train": report}, {"val": rows})[1:]

    for words in (["yes"], ['["yes"]', "Arena"]):
        (line,) = lines_of(*words)
        assert line.startswith("warning: train: 3 of 3 rows have the text of a list as the prompt")
    assert lines_of('["yes"]') == []


# --- rows against each other ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["question", "instruction", "messages", "conversations"])
def test_a_question_beside_messages_is_not_left_out(name):
    sides = {side: [{"role": "assistant", "content": side}] for side in TEXT}
    question = [{"role": "user", "content": "q"}] if name in ("messages", "conversations") else "q"
    row = {"system": "s", name: question, **sides}
    assert error_of(row) == f"prompt: missing, but there is {name}; use --columns prompt={name}"
    del row["system"]
    row[name] = question
    assert error_of(row) == f"prompt: missing, but there is {name}; use --columns prompt={name}"
    row |= {"system": "s", "prompt": row.pop(name)}
    assert read(row)[0] == [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]


def test_a_list_of_rejected_responses_is_one_pair_for_each(tmp_path):
    encoder = Encoder(load_tokenizer("data/demo/model"))
    alone = [{"prompt": "q", "chosen": "x", "rejected": text} for text in "yz"]
    together = {"prompt": "q", "chosen": "x"}
    candidates = [list("yxz"), [[assistant("y")], [assistant("x")], [assistant("z")]]]
    candidates += [json.dumps(candidates[1]), [json.dumps(turns) for turns in candidates[1]]]
    (tmp_path / "a").write_text("\n".join(map(json.dumps, alone)))
    expected = [pair[:3] for pair in reading.pairs(tmp_path / "a", encoder)[0]]
    [text], _ = reading.texts(tmp_path / "a", encoder, limit=1)
    for rejected in candidates:
        (tmp_path / "b").write_text(json.dumps({**together, "rejected": rejected}))
        pairs, report = reading.pairs(tmp_path / "b", encoder)
        assert [pair[:3] for pair in pairs] == expected
        assert {pair.location for pair in pairs} == {f"{tmp_path}/b:1"}
        assert (report["rows"], report["dropped"]) == (3, {"identical": 1})
        [same], _ = reading.texts(tmp_path / "b", encoder)  # the chosen one is trained once
        assert same.prompt + same.reply == text.prompt + text.reply


KEEP_ONE = "of two rows with the same responses in both orders, keep one"


def test_duplicates_and_contradictions_are_counted_and_above_1_percent_a_warning(tmp_path):
    encoder = Encoder(load_tokenizer("data/demo/model"))
    rows = [{"prompt": f"{n}?", **TEXT} for n in range(196)]
    other = {"chosen": "y", "rejected": "x"}

    def lines(*more):
        path = tmp_path / "f.jsonl"
        path.write_text("\n".join(map(json.dumps, [*rows, *more])))
        report = reading.pairs(path, encoder)[1]
        line, *warnings = preference_data.describe_all({"train": report}, {"val": rows})
        return line.split("; ")[3:], warnings

    assert lines({"prompt": "?", **TEXT}, {"prompt": "new", **other}) == ([], [])
    # 2 of 198, and 2 of 200 which are the same two
    assert lines(*rows[:1], {**rows[1], **other}) == (
        ["1 exact duplicates", "2 pairs contradict each other"],
        [f"warning: train: 2 pairs contradict each other; {KEEP_ONE}"],
    )
    count, warnings = lines(*rows[:3], {**rows[1], **other})
    assert count == ["3 exact duplicates", "2 pairs contradict each other"]
    assert warnings == ["warning: train: 3 exact duplicates; keep one of equal rows"]
    path = tmp_path / "f.jsonl"  # for SFT, the second order is another reply
    assert reading.texts(path, encoder)[1]["notes"]["exact duplicates"] == 3
    assert "pairs contradict each other" not in reading.texts(path, encoder)[1]["notes"]


# --- transcripts ---------------------------------------------------------------------------------

HI = "\n\nHuman: Hi\n\nAssistant: Hello."


UNORDERED = "user and assistant do not alternate"
QUESTION = f"{HI}\n\nHuman: q: Human: ?"
TRANSCRIPTS = [
    ("\n\nHuman: q\n\nAssistant: a ", "\n\nHuman:q\n\nAssistant:b", ([user("q")], "a", "b")),
    (
        f"{QUESTION}\n\nAssistant: x\n\ny",
        f"{QUESTION}\n\nAssistant: Assistant: z\nHuman: w",
        (
            [user("Hi"), assistant("Hello."), user("q: Human: ?")],
            "x\n\ny",
            "Assistant: z\nHuman: w",
        ),
    ),
    (HI, HI, "identical"),
    (HI, "\n\nHuman: Hi\n\nAssistant: ", "empty response"),
    (HI, "\n\nHuman: Ho\n\nAssistant: Hello.", "prompts differ"),
    (HI + "\n\nHuman: q\n\nAssistant: a", HI, "prompts differ"),
    (f"{HI}\n\nHuman: a", f"{HI}\n\nHuman: b", UNORDERED),
    (f"{HI}\n\nAssistant: x", f"{HI}\n\nAssistant: y", UNORDERED),
    ("\n\nHuman: \n\nAssistant: x", "\n\nHuman:\n\nAssistant: y", UNORDERED),
]


def test_transcripts_are_split_before_the_last_turn_of_the_assistant():
    for chosen, rejected, expected in TRANSCRIPTS:
        assert read({"chosen": chosen, "rejected": rejected}) == expected
        if isinstance(expected, str):
            assert read({"chosen": rejected, "rejected": chosen}, "transcript") == expected


def test_transcripts_beside_a_prompt_are_no_replies(tmp_path):
    for begin in ("\n\n", "", "\n"):
        sides = {side: f"{begin}Human: q\n\nAssistant: {TEXT[side]}" for side in TEXT}
        assert read({"prompt": "q", **sides}) == ([user("q")], "x", "y")
        assert read({"prompt": "another one", **sides}) == "prompts differ"
        rows = [{"prompt": "q", **TEXT}, {"prompt": "q", **sides}]
        (tmp_path / "f.jsonl").write_text("\n".join(map(json.dumps, rows)))
        with pytest.raises(UserError, match="f.jsonl:2: chosen: must be one reply, not turns of"):
            reading.pairs(tmp_path / "f.jsonl", Encoder(load_tokenizer("data/demo/model")))


def test_a_prompt_may_be_a_transcript():
    for sides in (TEXT, {side: f"{QUESTION}\n\nAssistant: {text}" for side, text in TEXT.items()}):
        row = {"prompt": f"{QUESTION}\n\nAssistant:", **sides}
        assert read(row) == ([user("Hi"), assistant("Hello."), user("q: Human: ?")], "x", "y")


BEGINS = [  # of conversations that a chat template has rendered
    "<|im_start|>system\n",
    "<s>[INST] ",
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n",
    " <bos><start_of_turn>user\n",
    "<|user|>\n",
    "\n\nHuman: q\n\nAssistant:",
    "<bos><|turn>user\n",  # Gemma 4
    "<|turn>user\n",
    "<|start|>system<|message|>",  # gpt-oss
    "<｜begin▁of▁sentence｜><｜User｜>",  # DeepSeek
    "[gMASK]<sop><|user|>\n",  # GLM
    "<|im_system|>system<|im_middle|>",  # Kimi
    "<|begin_of_text|><|header_start|>user<|header_end|>\n\n",  # Llama 4
    "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]",  # Mistral
    "[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]",
    "<s>[AVAILABLE_TOOLS]",
    "<|start_of_role|>system<|end_of_role|>",  # Granite
    "<BOS_TOKEN><|START_OF_TURN_TOKEN|><|USER_TOKEN|>",  # Cohere
    "<|endoftext|><|user|>\n",  # OLMo
    "]~!b[]~b]system\n",  # MiniMax
    "<begin_of_document><beginning_of_sentence>system",
    "[|user|]",  # EXAONE
    "BEGINNING OF CONVERSATION: USER: Hi ASSISTANT:",  # PKU-SafeRLHF
    "### Instruction:\nHi\n\n### Response:\n",  # Alpaca
    "Below is an instruction.\n\n### Instruction:\nHi\n\n### Response:",
    "A chat between a user and an assistant. USER: Hi ASSISTANT:",  # Vicuna
    "User: Hi\nAssistant:",
    "<s>USER: Hi ASSISTANT:",  # with BOS
]
ORDINARY = ["<s>old</s>", "<s><b>old</b></s>", "<s>[1]</s>", "[TODO]", "[B]big[/B]", "<|>", "<| f"]
ORDINARY += ["Question: what is it?\nAnswer:", "assistant: is it USER: or user?"]
ORDINARY += ["### Instruction:\nhow do I write it?", "a # b\n### Response:"]
ORDINARY += ["<table_of_contents>", "<user_query>", "<b>", "[MASK] is", "Human:", "|user|"]
OWN = {  # template -> how it begins
    "{{ bos_token }}{% for m in messages %}{{ m.role }}\n{{ m.content }}#{% endfor %}": "user\n",
    "{% for m in messages %}<r>{{ m.role }}</r>{{ m.content }}{% endfor %}": "<r>system</r>",
    "Once. {% for m in messages if m.role != 'system' %}Q: {{ m.content }}{% endfor %}": "Once. Q:",
}


@pytest.mark.parametrize("begin", BEGINS)
def test_a_prompt_that_a_template_has_rendered_is_not_rendered_again(begin, tmp_path):
    tokenizer = load_tokenizer("data/demo/model")
    path = tmp_path / "f.jsonl"
    path.write_text(json.dumps({"prompt": begin, "completion": "x"}))
    with pytest.raises(UserError, match="f.jsonl:1: prompt: begins with .*; use messages, or --c"):
        reading.texts(path, Encoder(tokenizer))
    [text], _ = reading.texts(path, Encoder(tokenizer, "none"))
    assert text.prompt == tokenizer(begin).input_ids
    path.write_text(json.dumps({"system": "s", "prompt": begin, "completion": "x"}))
    with pytest.raises(UserError, match="f.jsonl:1: prompt: begins with .*; use messages, or --c"):
        reading.texts(path, Encoder(tokenizer))
    # what another model's template begins with may be the subject of other turns
    turns = [{"role": "system", "content": begin}, user("q"), assistant(begin), user(begin)]
    for turn, role in ((turns, "user"), (turns[:2], "system")):
        path.write_text(json.dumps({"prompt": turn, "completion": [assistant("x")]}))
        if "<|im_start|>" in begin:
            with pytest.raises(UserError, match="f.jsonl:1: .*: (begins with|contains) .*; "):
                reading.texts(path, Encoder(tokenizer))
        else:
            assert len(reading.texts(path, Encoder(tokenizer))[0]) == 1, role
    path.write_text(json.dumps({"prompt": f"What is {begin}?", "completion": "x"}))
    if "<|im_start|>" in begin:  # it would be the token with which this template begins a turn
        with pytest.raises(UserError, match=r"f.jsonl:1: prompt: contains <\|im_start\|>, with"):
            reading.texts(path, Encoder(tokenizer))
    else:
        assert len(reading.texts(path, Encoder(tokenizer))[0]) == 1


@pytest.mark.parametrize("template", OWN)
def test_a_prompt_that_begins_as_the_template_at_hand_does_is_an_error(template):
    """Nothing about such a text is unusual, apart from this template."""
    tokenizer = load_tokenizer("data/demo/model")
    assert OWN[template] in Encoder(tokenizer).text(OWN[template])
    tokenizer.bos_token, tokenizer.chat_template = "<s>", template
    encoder = Encoder(tokenizer)
    for before in ("", "<s>", " <s> "):
        with pytest.raises(UserError, match="prompt: begins with .*; use messages, or --chat_t"):
            encoder.text(f"{before}{OWN[template]} q")
    for text in (f"What is {OWN[template]}?", *ORDINARY):
        assert text in encoder.text(text)


def test_white_space_costs_no_more_than_its_length():
    """Code and texts of PDFs begin with it, or have it in a line. Each needs a millisecond, and
    needed 28 s and 7 s with an expression that was cubic at the beginning and quadratic in a line.
    """
    encoder = Encoder(load_tokenizer("data/demo/model"))
    log = "a user: " * 16_000  # a line of a log of 128 kB; needed 40 s
    for text in (" " * 1000 + "x = 1", "x" + " " * 10_000 + "y", log):
        start = time.process_time()
        encoder.check_turn("prompt", text, is_first=True)
        assert time.process_time() - start < 2


def test_texts_that_resemble_a_template_are_rendered():
    tokenizer = load_tokenizer("data/demo/model")
    for bos in ("<s>", "<|im_start|>"):
        tokenizer.bos_token = bos
        encoder = Encoder(tokenizer)
        for text in ORDINARY:
            assert text in encoder.text(text)
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    assert Encoder(tokenizer).begins == ()


def test_replies_that_repeat_the_prompt_are_a_warning(tmp_path):
    path = tmp_path / "f.jsonl"
    question = "What is the capital of France?"
    rows = [
        {"prompt": question, "chosen": f"{question} {n}", "rejected": f"{question}"} for n in "123"
    ]
    rows += [
        {"prompt": "Yes or no?", "chosen": f"Yes or no? Yes{end}", "rejected": "Yes or no? No."}
        for end in ".!"
    ]
    rows += [{"prompt": question, "chosen": question, "rejected": "No."}]
    for count, begin in (
        (5, ["warning: train: 3 of 5 rows have replies that begin with"]),
        (6, []),
    ):
        path.write_text("\n".join(map(json.dumps, rows[:count])))
        encoder = Encoder(load_tokenizer("data/demo/model"))
        _, report = reading.pairs(path, encoder)
        warnings = preference_data.describe_all({"train": report}, {"val": rows})[1:]
        assert [line[: len(begin[0])] for line in warnings] == begin
