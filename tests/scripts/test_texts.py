"""Supervised fine-tuning: which tokens are trained, for each format, template and length."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_pairs import CHATML, GEMMA, LLAMA3, R1, THINKING, chat_tokenizer, tokenizer

import reading
from conftest import ROOT
from ddp_utils import UserError, data
from lm import chat_template, instruction_data, logps
from lm.chat_template import Encoder
from lm.instruction_data import Text

PLAIN = tokenizer(bos=False, merges=[])  # bytes: decoding gives back each letter


def talk(*texts, system=None):
    """Return messages in which user and assistant alternate."""
    roles = itertools.cycle(("user", "assistant"))
    turns = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return [{"role": "system", "content": system}, *turns] if system else turns


def shown(encoder, text):
    """Return the text with its trained parts in {braces}."""
    assert text.prompt and text.scored[0] == 1 and set(text.scored) <= {0, 1}
    tokens = text.prompt + text.reply
    scored = [0] * len(text.prompt) + text.scored
    parts = []
    for on, group in itertools.groupby(zip(tokens, scored, strict=True), key=lambda pair: pair[1]):
        part = encoder.tokenizer.decode([token for token, _ in group])
        parts.append(f"{{{part}}}" if on else part)
    return "".join(parts)


def encode(encoder, prompt, reply):
    text, whole, notes = instruction_data.encode(encoder, "f:1", prompt, reply)
    return text, notes | ({"truncated"} if text != whole else set())


def written(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def read(tmp_path, *rows, template=None, **options):
    """Return each text as shown, and the report on these rows; a token is a byte."""
    encoder = Encoder(chat_tokenizer(template, bos=False) if template else PLAIN)
    texts, report = reading.texts(written(tmp_path, *rows), encoder, **options)
    return [shown(encoder, text) for text in texts], report


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


@pytest.mark.parametrize("kind", ROWS)
def test_lists_of_each_kind_may_be_json_texts(tmp_path, kind):
    """A table has them so."""
    row, _, chat = ROWS[kind]
    for indent in (None, 1):
        texts = {
            k: v if isinstance(v, str) else json.dumps(v, indent=indent) for k, v in row.items()
        }
        assert read(tmp_path, texts, template=CHATML)[0] == [chat]


def test_prompt_and_completion_may_be_messages_of_which_the_completion_is_trained(tmp_path):
    prompt, completion = talk("Hi", "Ho", "Who?", system="S"), talk("", "Me.", "So?", "Yes.")[1:]
    before = "<|h|>system\nS</s>\n<|h|>user\nHi</s>\n<|h|>assistant\nHo</s>\n<|h|>user\nWho?</s>\n"
    expected = before + "<|h|>assistant\n{Me.</s>}"
    for reply in (completion[:1], completion[0], "Me."):
        for row in ({"prompt": prompt, "completion": reply}, {"question": prompt, "answer": reply}):
            texts, report = read(tmp_path, row, template=CHATML)
            assert (texts, report["format"]) == ([expected], "custom")
    row = {"prompt": "Who?", "completion": completion}
    expected = "<|h|>user\nWho?</s>\n<|h|>assistant\n{Me.</s>}\n<|h|>user\nSo?</s>\n"
    assert read(tmp_path, row, template=CHATML)[0] == [expected + "<|h|>assistant\n{Yes.</s>}"]


def test_a_conversation_without_a_question_is_truncated_like_any_other():
    encoder = Encoder(chat_tokenizer(CHATML, bos=False), max_length=20)
    for turns in ([LONG[0]], [LONG[0], LONG[2]]):
        text, notes = encode(encoder, turns, "ffff")
        assert text.num_tokens == 20 and shown(encoder, text).endswith("{ffff</s>}")
        assert notes == {"truncated"}
    assert encode(Encoder(PLAIN), [LONG[0]], "f")[0].text == "S"


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


@pytest.mark.parametrize(("names", "kind"), KINDS)
def test_the_fields_decide_about_the_kind(names, kind):
    record = data.Record("f:1", dict.fromkeys(names.split(), 1))
    assert instruction_data.find_format(record).name == kind


@pytest.mark.parametrize("file", sorted((ROOT / "tests/data/formats").iterdir()), ids=str)
def test_a_preference_trains_the_chosen_reply_of_its_pair(file):
    encoder = Encoder(PLAIN)
    texts, report = reading.texts(file, encoder)
    assert report["format"] == "preference"
    texts = {text.location: (text.prompt, text.reply, text.scored, text.text) for text in texts}
    for pair in reading.pairs(file, encoder)[0]:
        scored = [1] * len(pair.chosen)
        assert texts[pair.location] == (pair.prompt, pair.chosen, scored, pair.text)


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
PHI3 = (  # the end token stands behind the complete conversation, and so not between its turns
    "{% for m in messages %}<|h|>{{ m.role }}\n{{ m.content }}<|eot|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|h|>assistant\n{% else %}</s>{% endif %}"
)
EACH = THINKING.replace("loop.last", "true")  # a thought before each reply, as TRL trains Qwen3
NUMBERED = (  # turns are counted from the last one
    "{% for m in messages %}{{ loop.revindex }}{{ m.content }}<|eot|>{% endfor %}"
)
COUNTED = "{{ messages | length }}{% for m in messages %}{{ m.content }}<|eot|>{% endfor %}"
UNENDED = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
OLMO = (  # the last reply ends with another token than the earlier ones
    "{% for m in messages %}<|h|>{{ m.role }}\n{{ m.content }}"
    "{% if m.role == 'assistant' and loop.last %}{{ eos_token }}{% else %}<|eot|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|h|>assistant\n{% endif %}"
)
GLM = (  # a reply ends where the user's turn begins
    "{% for m in messages %}{{ '<|/h|>' if m.role == 'assistant' else '<|h|>' }}\n{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}<|/h|>\n{% endif %}"
)
TALK = talk("Hi", "Hello! ", "Who?", system="Be kind.")


TEMPLATES = {"llama3": LLAMA3, "gemma": GEMMA, "llama2": LLAMA2, "phi3": PHI3, "each thinks": EACH}
TEMPLATES |= {"a thought": THINKING, "thinking": THINKING}  # no thought before the reply inside
TEMPLATES |= {"olmo": OLMO, "glm": GLM}
TEMPLATES |= {"numbered": NUMBERED, "counted": COUNTED, "unended": UNENDED}
TEMPLATES["trimmed"] = CHATML.replace("m.content", "m.content | trim")
EXPECTED = json.loads((ROOT / "tests/data/templates_expected.json").read_text())


@pytest.mark.parametrize("name", EXPECTED["trained"])
def test_every_reply_is_trained_with_its_end_and_nothing_else(name):
    has_bos = name not in ("phi3", "each thinks", "trimmed")
    encoder = Encoder(chat_tokenizer(TEMPLATES[name], bos=has_bos))
    text, notes = encode(encoder, TALK, "Me.")
    assert (shown(encoder, text), notes) == (EXPECTED["trained"][name], set())
    assert text.text == "system: Be kind.\nuser: Hi"


def test_sampling_stops_at_each_end_that_is_trained():
    # a token that ends a thought does not end the reply
    thinks = OLMO.replace(
        "{{ m.content }}", "{{ m.thinking }}{{ '<|eot|>' if m.thinking }}{{ m.content }}"
    )
    cases = (OLMO, ["</s>", "<|eot|>"]), (GLM, ["</s>", "<|h|>"]), (thinks, ["</s>"])
    for template, ends in cases:
        tok = chat_tokenizer(template)
        assert Encoder(tok).ends == tok.convert_tokens_to_ids(ends)


def test_a_thought_in_an_earlier_reply_is_an_error_or_not_trained():
    tok = chat_tokenizer(R1, bos=False)
    turns = talk("2+2?", "<think>hm</think>4", "+1?")
    with pytest.raises(UserError, match="reply: the chat template renders '<think>hm</think>4' as"):
        encode(Encoder(tok), turns, "5")
    encoder = Encoder(tok, keep_thoughts=True)
    text, notes = encode(encoder, turns, "<think>so</think>5")
    expected = "<|h|>2+2?<|/h|>4<|eot|><|h|>+1?<|/h|><think>\n{so</think>5<|eot|>}"
    assert (shown(encoder, text), notes) == (expected, {"only the last reply is trained"})


@pytest.mark.parametrize("name", EXPECTED["rewritten"])
def test_where_the_template_rewrites_a_reply_only_the_last_is_trained(name):
    before, expected = EXPECTED["rewritten"][name]
    encoder = Encoder(chat_tokenizer(TEMPLATES[name], bos=False))
    text, notes = encode(encoder, before, "5")
    assert (shown(encoder, text), notes) == (expected, {"only the last reply is trained"})
    assert text.text == before[0]["content"]


WEIGHTS = {  # of three replies -> what is read and {trained}
    (1, 0, 1): ("{b</s>}", "d</s>", "\n<|h|>user\ne</s>\n<|h|>assistant\n{f</s>}"),
    (0, None, 0.0): ("b</s>", "{d</s>}", ""),
    (True, True, False): ("{b</s>}", "{d</s>}", ""),
}


@pytest.mark.parametrize("name", chat_template.WEIGHTS)
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


SHORT = "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}</s>{% endfor %}"
SHORT += "{% if add_generation_prompt %}a: {% endif %}"
BARE = "{% for m in messages %}{{ m.content }}{{ '</s>' if m.role == 'assistant' }}{% endfor %}"
SAME = ("assistant\n", "user\n", "user\n", "assistant\n", "user\n")
TURNS = [  # template, settings of the tokenizer, prompt, reply, what is {trained}
    (  # a reply is found at its place, also if the user writes the same
        *(CHATML, {}, SAME, "user\n"),
        "<|h|>user\nassistant\n</s>\n<|h|>assistant\n{user\n</s>}\n<|h|>user\nuser\n</s>\n"
        "<|h|>assistant\n{assistant\n</s>}\n<|h|>user\nuser\n</s>\n<|h|>assistant\n{user\n</s>}",
    ),
    (  # a reply that has an end token in its text has one end token
        *(CHATML, {}, ("Hi", "Ho</s>", "Up?"), "Down.</s>"),
        "<|h|>user\nHi</s>\n<|h|>assistant\n{Ho</s>}\n<|h|>user\nUp?</s>\n"
        "<|h|>assistant\n{Down.</s>}",
    ),
    (
        *(None, {}, ("Hi", "Ho</s>", "Up?"), "Down.</s>"),
        "\n\nHuman: Hi\n\nAssistant:{ Ho</s>}\n\nHuman: Up?\n\nAssistant:{ Down.</s>}",
    ),
    (  # without an end token replies are trained without
        *(None, {"eos_token": None}, ("Hi", "Ho ", "Up?"), "Down."),
        "\n\nHuman: Hi\n\nAssistant:{ Ho }\n\nHuman: Up?\n\nAssistant:{ Down.}",
    ),
    (  # a token that merges prompt and reply is trained
        *(SHORT, {"merges": [("Ġ", "y"), ("Ċ", "Ċ")]}, ("q", "yes", "q"), "no"),
        "u: q</s>a:{ yes</s>}u: q</s>a: {no</s>}",
    ),
    # a first token is never trained, since nothing predicts it
    (BARE, {"merges": [("a", "b")]}, ("a", "b", "c"), "d", "ab{</s>}c{d</s>}"),
]


@pytest.mark.parametrize(("template", "options", "turns", "reply", "expected"), TURNS)
def test_replies_are_trained_with_one_end_token(template, options, turns, reply, expected):
    options = dict(options)
    merges = options.pop("merges", [])
    tok = tokenizer(bos=False, merges=merges) if merges else chat_tokenizer(template, bos=False)
    tok.chat_template = template
    for name, value in options.items():
        setattr(tok, name, value)
    encoder = Encoder(tok)
    assert shown(encoder, encode(encoder, talk(*turns), reply)[0]) == expected


WORDS = st.text(st.sampled_from("ab12 \n\té?y/s{}'"), max_size=12).map(lambda text: f"{text}.")
TALKS = st.lists(WORDS, min_size=2, max_size=8).filter(lambda texts: len(texts) % 2 == 0)


@pytest.mark.parametrize("template", [None, LLAMA3, GEMMA, CHATML, EACH])
@settings(max_examples=30, deadline=None)
@given(texts=TALKS, system=st.none() | WORDS)
def test_a_conversation_trains_the_tokens_of_its_replies_as_separate_rows(template, texts, system):
    encoder = Encoder(chat_tokenizer(template) if template else tokenizer(merges=[]))
    text = encode(encoder, talk(*texts[:-1], system=system), texts[-1])[0]
    assert text.trained == len(text.targets[0])
    ids, scored = text.prompt + text.reply, [0] * len(text.prompt) + text.scored
    trained = [0] * len(ids)
    for turn in range(1, len(texts), 2):
        prompt = talk(*texts[:turn], system=system)
        for message in prompt:
            if not template and message["role"] == "assistant":
                message["content"] += "</s>"
        alone = encoder.encode("f:1", prompt, texts[turn], "!")[0]
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
    text, notes = encode(encoder, LONG, "ffff")
    assert shown(encoder, text) == "<|h|>system\nS</s>\n" + "".join(PARTS[dropped:])
    assert notes == ({"truncated"} if dropped else set())
    assert text.text == "system: S\nuser: aaaa"


def test_an_exchange_that_is_too_long_is_truncated_like_a_pair():
    tok = chat_tokenizer(CHATML, bos=False)
    encoder = Encoder(tok, max_length=20)
    text, notes = encode(encoder, LONG, "ffff")
    pair = encoder.truncate(encoder.encode("f:5", [LONG[0], LONG[-1]], "ffff", "!")[0])
    assert (text.prompt, text.reply) == (pair.prompt, pair.chosen)
    assert shown(encoder, text) == "ee</s>\n<|h|>assistant\n{ffff</s>}"  # 15 and 5
    assert notes == {"truncated"}


@pytest.mark.parametrize("template", [None, CHATML])
@settings(max_examples=60, deadline=None)
@given(texts=TALKS, max_length=st.integers(2, 120))
def test_no_text_is_too_long_or_without_a_trained_token(template, texts, max_length):
    tok = chat_tokenizer(template) if template else PLAIN
    encoder = Encoder(tok, max_length=max_length)
    text, notes = encode(encoder, talk(*texts[:-1]), texts[-1])
    whole = encode(Encoder(tok), talk(*texts[:-1]), texts[-1])[0]
    shown(encoder, text)
    assert text.num_tokens <= max_length
    assert (text == whole) == (whole.num_tokens <= max_length) == ("truncated" not in notes)


def test_a_row_without_space_for_a_reply_is_dropped(tmp_path):
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
        # line 4 repeats line 2; line 8 has earlier turns
        "notes": {
            "truncated": 2,
            "exact duplicates": 1,
            "with turns as Human: and Assistant:": 1,
        },
        # of whole texts: 2 2 30 22; 7 7 10 34; of what is left: 7 7 10 7, without the answer b
        "mean_tokens": {"prompt": 14.0, "reply": 14.5, "trained": 7.8},
    }
