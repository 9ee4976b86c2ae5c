"""Texts to imitate: which tokens are trained, for each kind of row, template and length."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_pairs import (
    CHATML,
    GEMMA,
    LLAMA3,
    THINKING,
    chat_tokenizer,
    tokenizer,
)

import reading
from conftest import ROOT
from ddp_utils import UserError, data, logps, preference_data
from ddp_utils.chat_template import Encoder
from ddp_utils.models import load_tokenizer
from sft import instruction_data
from sft.instruction_data import Text

PLAIN = tokenizer(bos=False, merges=[])  # bytes: decoding gives back each letter


def talk(*said, system=None):
    """Messages from what user and assistant say by turns."""
    roles = itertools.cycle(("user", "assistant"))
    turns = [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]
    return [{"role": "system", "content": system}, *turns] if system else turns


def shown(encoder, text):
    """The text with what is trained in {braces}."""
    assert text.prompt and text.scored[0] == 1 and set(text.scored) <= {0, 1}
    assert len(text.scored) == len(text.reply)
    runs = itertools.groupby(
        zip(text.prompt + text.reply, [0] * len(text.prompt) + text.scored, strict=True),
        key=lambda token: token[1],
    )
    said = [(on, encoder.tokenizer.decode([token for token, _ in run])) for on, run in runs]
    return "".join(f"{{{part}}}" if on else part for on, part in said)


def written(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def read(tmp_path, *rows, template=None, **options):
    """(each text as shown, the report) of these rows, in bytes."""
    encoder = Encoder(chat_tokenizer(template, bos=False) if template else PLAIN)
    found, report = reading.texts(written(tmp_path, *rows), encoder, **options)
    return [shown(encoder, text) for text in found], report


# --- kinds of rows -------------------------------------------------------------------------------

# kind -> row -> what is read and {trained}, without a template and with one (ChatML)
ROWS = json.loads((ROOT / "tests/data/texts_expected.json").read_text())


@pytest.mark.parametrize("kind", ROWS)
def test_each_kind_is_found_and_read_as_written_by_hand(tmp_path, kind):
    row, plain, chat = ROWS[kind]
    kind = "alpaca" if kind == "a question" else kind
    for template, expected in ((None, plain), (CHATML, chat)):
        found, report = read(tmp_path, row, template=template)
        assert found == [expected]
        assert (report["format"], report["fields_not_read"]) == (kind, "")
        assert report["template"] == bool(template)


KINDS = [  # names of fields -> the kind
    ("instruction output prompt completion", "custom"),
    ("instruction output chosen rejected", "preference"),
    ("conversations id", "sharegpt"),
    ("conversations chosen rejected", "preference"),
    ("messages prompt response", "messages"),
    ("prompt completion", "custom"),
    ("prompt response", "custom"),
    ("input preferred_output non_preferred_output", "preference"),
]


def test_the_fields_tell_the_kind_or_are_named(tmp_path):
    for names, kind in KINDS:
        record = data.Record("f:1", dict.fromkeys(names.split(), 1))
        assert instruction_data.find_format(record).name == kind
    row = {"answer": "3", "question": "2", "request": "Tell me.", "story": "Once."}
    found, report = read(
        tmp_path, {**row, "system": "Lie."}, columns="prompt=request,completion=story"
    )
    assert found == ["\n\nSystem: Lie.\n\nHuman: Tell me.\n\nAssistant:{ Once.</s>}"]
    assert report["fields_not_read"] == "answer, question"


@pytest.mark.parametrize("file", sorted((ROOT / "tests/data/formats").iterdir()), ids=str)
def test_every_preference_row_gives_the_prompt_and_the_chosen_reply_of_its_pair(file):
    encoder = Encoder(PLAIN)
    found, report = reading.texts(file, encoder)
    assert report["format"] == "preference"
    expected, _ = reading.pairs(file, encoder)
    same = {text.location: (text.prompt, text.reply, text.text) for text in found}
    for pair in expected:
        assert same[pair.location] == (pair.prompt, pair.chosen, pair.text)
    assert all(text.trained == len(text.reply) for text in found)


@pytest.mark.parametrize("shared", [False, True])
def test_only_trained_tokens_are_targets_each_behind_the_token_before_it(shared):
    first = Text([5, 6], [7, 8, 9], [1, 0, 1], "f:1", "five")
    batch = logps.collate([first, Text([4], [3], [1], "f:2", "four")], shared=shared)
    assert batch.targets.tolist() == [7, 9, 3]
    assert batch.ids.tolist() == ([[5, 6, 7, 8, 4]] if shared else [[5, 6, 7, 8], [4, 0, 0, 0]])
    assert batch.ids.flatten()[batch.hidden_index].tolist() == [6, 8, 4]
    assert batch.tokens.tolist() == [[2, 1]]


# --- conversations -------------------------------------------------------------------------------

LLAMA2 = (  # white space on both sides of a reply; the system text inside the first turn
    "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content.strip() }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content.strip() }} </s>{% else %}"
    "{{ raise_exception('no system') }}{% endif %}{% endfor %}"
)
PHI3 = (  # eos behind the whole: a conversation that goes on does not begin with one that ended
    "{% for m in messages %}<|h|>{{ m.role }}\n{{ m.content }}<|eot|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|h|>assistant\n{% else %}</s>{% endif %}"
)
EACH = THINKING.replace("loop.last", "true")  # a thought before each reply, as TRL trains Qwen3
NUMBERED = (  # turns are counted from the last one
    "{% for m in messages %}{{ loop.revindex }}{{ m.content }}<|eot|>{% endfor %}"
)
COUNTED = "{{ messages | length }}{% for m in messages %}{{ m.content }}<|eot|>{% endfor %}"
UNENDED = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
TALK = talk("Hi", "Hello! ", "Who?", system="Be kind.")


TEMPLATES = {"llama3": LLAMA3, "gemma": GEMMA, "llama2": LLAMA2, "phi3": PHI3, "each thinks": EACH}
TEMPLATES |= {"a thought": THINKING, "thinking": THINKING}  # no thought before the reply inside
TEMPLATES |= {"numbered": NUMBERED, "counted": COUNTED, "unended": UNENDED}
TEMPLATES["trimmed"] = CHATML.replace("m.content", "m.content | trim")
EXPECTED = json.loads((ROOT / "tests/data/templates_expected.json").read_text())


@pytest.mark.parametrize("name", EXPECTED["trained"])
def test_every_reply_is_trained_with_its_end_and_nothing_else(name):
    has_bos = name not in ("phi3", "each thinks", "trimmed")
    encoder = Encoder(chat_tokenizer(TEMPLATES[name], bos=has_bos))
    text, notes = instruction_data.encode(encoder, "f:1", TALK, "Me.")
    assert shown(encoder, text) == EXPECTED["trained"][name]
    assert text.text == "system: Be kind.\nuser: Hi"
    assert not notes


@pytest.mark.parametrize("name", EXPECTED["rewritten"])
def test_where_the_template_rewrites_a_reply_only_the_last_is_trained(name):
    before, expected = EXPECTED["rewritten"][name]
    encoder = Encoder(chat_tokenizer(TEMPLATES[name], bos=False))
    text, notes = instruction_data.encode(encoder, "f:9", before, "5")
    assert shown(encoder, text) == expected
    assert notes == {"only the last reply is trained"}
    assert text.text == before[0]["content"]


WEIGHTS = {  # of three replies -> what is read and {trained}
    (1, 0, 1): ("{b</s>}", "d</s>", "\n<|h|>user\ne</s>\n<|h|>assistant\n{f</s>}"),
    (0, None, 0.0): ("b</s>", "{d</s>}", ""),
    (True, True, False): ("{b</s>}", "{d</s>}", ""),
}


@pytest.mark.parametrize("name", data.WEIGHTS)
def test_a_turn_without_weight_is_read_and_not_trained(tmp_path, name):
    for weights, (first, second, rest) in WEIGHTS.items():
        turns = talk("a", "b", "c", "d", "e", "f", system="S")
        for turn, weight in zip(turns[2::2], weights, strict=True):
            turn[name] = weight
        turns[1][name] = 0  # a question's changes nothing
        expected = f"<|h|>system\nS</s>\n<|h|>user\na</s>\n<|h|>assistant\n{first}\n"
        expected += f"<|h|>user\nc</s>\n<|h|>assistant\n{second}{rest}"
        row = {"messages": talk("a", "b")}
        row["messages"][1][name] = 0
        shown_texts, report = read(tmp_path, {"messages": turns}, row, template=CHATML)
        assert (shown_texts, report["fields_not_read"]) == ([expected], "")
        assert report["dropped"] == {"no reply to train": 1}


def test_a_reply_that_says_what_the_user_says_is_found_in_its_place():
    encoder = Encoder(chat_tokenizer(CHATML, bos=False))
    before = talk("assistant\n", "user\n", "user\n", "assistant\n", "user\n")
    assert shown(encoder, instruction_data.encode(encoder, "f:1", before, "user\n")[0]) == (
        "<|h|>user\nassistant\n</s>\n<|h|>assistant\n{user\n</s>}\n<|h|>user\nuser\n</s>\n"
        "<|h|>assistant\n{assistant\n</s>}\n<|h|>user\nuser\n</s>\n<|h|>assistant\n{user\n</s>}"
    )


def test_a_reply_that_brings_its_end_has_one():
    for tok, space in ((PLAIN, " "), (chat_tokenizer(CHATML, bos=False), "")):
        encoder = Encoder(tok)
        text, notes = instruction_data.encode(
            encoder, "f:3", talk("Hi", "Ho</s>", "Up?"), "Down.</s>"
        )
        replies = [part.partition("}")[0] for part in shown(encoder, text).split("{")[1:]]
        assert replies == [f"{space}Ho</s>", f"{space}Down.</s>"]
        assert not notes


def test_without_an_end_token_replies_are_trained_without():
    tok = tokenizer(bos=False, merges=[])
    tok.eos_token = None
    encoder = Encoder(tok)
    text = instruction_data.encode(encoder, "f:1", talk("Hi", "Ho ", "Up?"), "Down.")[0]
    assert shown(encoder, text) == (
        "\n\nHuman: Hi\n\nAssistant:{ Ho }\n\nHuman: Up?\n\nAssistant:{ Down.}"
    )


def test_a_reply_inside_that_merges_with_what_stands_before_it_is_trained_whole():
    encoder = Encoder(tokenizer(bos=False, merges=[("Ġ", "y"), ("Ċ", "Ċ")]))
    tok = encoder.tokenizer
    tok.chat_template = (
        "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}a: {% endif %}"
    )
    encoder = Encoder(tok)
    text, notes = instruction_data.encode(encoder, "f:4", talk("q", "yes", "q"), "no")
    assert shown(encoder, text) == "u: q</s>a:{ yes</s>}u: q</s>a: {no</s>}"
    assert not notes


def test_a_first_token_is_never_trained_because_nothing_predicts_it():
    tok = tokenizer(bos=False)  # merges a and b
    tok.chat_template = (
        "{% for m in messages %}{{ m.content }}{{ '</s>' if m.role == 'assistant' }}{% endfor %}"
    )
    encoder = Encoder(tok)
    text, notes = instruction_data.encode(encoder, "f:1", talk("a", "b", "c"), "d")
    assert shown(encoder, text) == "ab{</s>}c{d</s>}"


SAID = st.text(st.sampled_from("ab12 \n\té?y/s{}'"), max_size=12).map(lambda said: f"{said}.")
TALKS = st.lists(SAID, min_size=2, max_size=8).filter(lambda said: len(said) % 2 == 0)


@pytest.mark.parametrize("template", [None, LLAMA3, GEMMA, CHATML, EACH])
@settings(max_examples=30, deadline=None)
@given(said=TALKS, system=st.none() | SAID)
def test_a_conversation_trains_what_its_replies_would_as_rows_of_their_own(template, said, system):
    encoder = Encoder(chat_tokenizer(template) if template else tokenizer(merges=[]))
    text = instruction_data.encode(encoder, "f:1", talk(*said[:-1], system=system), said[-1])[0]
    assert text.trained == len(text.targets[0])
    ids, scored = text.prompt + text.reply, [0] * len(text.prompt) + text.scored
    trained = [0] * len(ids)
    for turn in range(1, len(said), 2):
        prompt = talk(*said[:turn], system=system)
        for message in prompt:
            if not template and message["role"] == "assistant":
                message["content"] += "</s>"
        alone = encoder.encode("f:1", prompt, said[turn], "!")[0]
        row = alone.prompt + alone.chosen
        assert row == ids[: len(row)]
        trained[len(alone.prompt) : len(row)] = [1] * len(alone.chosen)
    assert scored == trained


# --- truncation ----------------------------------------------------------------------------------


LONG = talk("aaaa", "bbbb", "cccc", "dddd", "eeee", system="S")
PARTS = (  # 29, 29 and 28 bytes and marks; the system turn in front has 11
    "<|h|>user\naaaa</s>\n<|h|>assistant\n{bbbb</s>}\n",
    "<|h|>user\ncccc</s>\n<|h|>assistant\n{dddd</s>}\n",
    "<|h|>user\neeee</s>\n<|h|>assistant\n{ffff</s>}",
)


@pytest.mark.parametrize(("max_length", "dropped"), [(97, 0), (96, 1), (68, 1), (67, 2), (39, 2)])
def test_the_oldest_exchanges_go_first_and_whole_and_the_system_turn_stays(max_length, dropped):
    encoder = Encoder(chat_tokenizer(CHATML, bos=False), max_length=max_length)
    text, notes = instruction_data.encode(encoder, "f:5", LONG, "ffff")
    assert shown(encoder, text) == "<|h|>system\nS</s>\n" + "".join(PARTS[dropped:])
    assert notes == ({"truncated"} if dropped else set())
    assert text.text == "system: S\nuser: aaaa"


def test_an_exchange_that_is_too_long_alone_is_cut_as_a_pair_and_counted_once():
    tok = chat_tokenizer(CHATML, bos=False)
    encoder = Encoder(tok, max_length=20)
    text, notes = instruction_data.encode(encoder, "f:5", LONG, "ffff")
    pair = Encoder(tok, max_length=20).encode("f:5", [LONG[0], LONG[-1]], "ffff", "!")[0]
    assert (text.prompt, text.reply) == (pair.prompt, pair.chosen)
    assert shown(encoder, text) == "ee</s>\n<|h|>assistant\n{ffff</s>}"  # 15 and 5
    assert notes == {"truncated"}


@pytest.mark.parametrize("template", [None, CHATML])
@settings(max_examples=60, deadline=None)
@given(said=TALKS, max_length=st.integers(2, 120))
def test_no_text_is_too_long_or_without_a_trained_token(template, said, max_length):
    tok = chat_tokenizer(template) if template else PLAIN
    encoder = Encoder(tok, max_length=max_length)
    text, notes = instruction_data.encode(encoder, "f:1", talk(*said[:-1]), said[-1])
    whole = instruction_data.encode(Encoder(tok), "f:1", talk(*said[:-1]), said[-1])[0]
    shown(encoder, text)
    assert text.num_tokens <= max_length
    assert (text == whole) == (whole.num_tokens <= max_length) == (not notes)


def test_without_room_for_a_reply_a_row_is_dropped(tmp_path):
    with pytest.raises(UserError, match="0 usable rows of 1: 1 no trained token left"):
        path = written(tmp_path, {"prompt": "ab", "completion": "c"})
        reading.texts(path, Encoder(PLAIN, max_length=1))


# --- rows that cannot be used, and the report ----------------------------------------------------


def test_the_report_counts_by_row_what_a_hand_count_finds(tmp_path):
    first = {"instruction": "Hi", "output": "Hello."}  # 2 + 7 tokens
    long = {"instruction": "x" * 30, "output": "123456789"}  # 10 + 10 of 20 are left
    old = {"instruction": "Up?", "output": "Down.", "history": [["a", "b"]]}  # only 20 are kept
    path = written(
        tmp_path,
        {**first, "output": " "},
        first,
        {"instruction": "Hi", "output": 3},
        {**first, "source": "web", "input": None, "history": []},
        long,
        "{not json",
        {"messages": talk("Hi", "Ho")},
        old,
    )
    encoder = Encoder(PLAIN, max_length=20)
    found, report = reading.texts(path, encoder, on_bad_record="skip")
    assert [text.location.rsplit(":", 1)[1] for text in found] == ["2", "4", "5", "8"]
    assert report == {
        "file": str(path),
        "format": "alpaca",
        "fields_not_read": "source",
        "template": False,
        "rows": 8,
        "used": 4,
        "dropped": {"empty response": 1, "malformed": 3},
        "notes": {"truncated": 2},
        "mean_tokens": {"prompt": 6.8, "reply": 7.8, "trained": 7.8},  # 2 2 10 13; 7 7 10 7
    }
    assert preference_data.describe("train", report) == (
        "train: 8 rows of alpaca, 4 used; tokens 6.8 prompt, 7.8 reply, 7.8 trained; "
        "1 empty response; 3 malformed; 2 truncated; no chat template; "
        "not read: source"
    )


# --- whole files ---------------------------------------------------------------------------------


def test_the_files_of_the_demo_are_read_whole():
    """Token for token what the template of the model makes of each row."""
    tok = load_tokenizer(ROOT / "data/demo/model")
    for file, count, asked, more, reply in (
        ("instructions.jsonl", 300, "instruction", "input", "output"),
        ("preferences_train.jsonl", 800, "prompt", "", "chosen"),
    ):
        path = ROOT / "data/demo" / file
        found, report = reading.texts(path, Encoder(tok, max_length=10_000))
        source = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(source) == len(found) == report["used"] == count
        for row, text in zip(source, found, strict=True):
            question = row[asked] + (f"\n{row[more]}" if row.get(more) else "")
            whole = tok.apply_chat_template(talk(question, row[reply]), tokenize=False)
            ids = tok(whole.removesuffix("\n"), add_special_tokens=False).input_ids
            assert text.prompt + text.reply == ids
            assert text.scored == [1] * len(text.reply)
