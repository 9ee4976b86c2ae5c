"""Preference files of seven kinds -> examples: hand-written rows, whole files, malformed rows."""

import json

import pytest

from conftest import ROOT
from ddp_utils import UserError, jsonl, preference_data
from ddp_utils.preference_data import Unusable

WHERE = "f.jsonl:7"
TEXT = {"chosen": "x", "rejected": "y"}


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def system(content):
    return {"role": "system", "content": content}


def human(value):
    return {"from": "human", "value": value}


def gpt(value):
    return {"from": "gpt", "value": value}


def read(row, name=None):
    """(prompt, chosen, rejected) of a row, or the reason why it is unusable."""
    record = jsonl.Record(WHERE, row)
    try:
        example = preference_data.example(record, name or preference_data.find_format(record))
    except Unusable as reason:
        return str(reason)
    assert example.where == WHERE
    return example[1:]


def read_file(path):
    """The name of the file's format, and what each row gives."""
    found = jsonl.read(path)
    name = preference_data.find_format(found[0])
    return name, [read(record.data, name) for record in found]


def complaint(row, name=None):
    with pytest.raises(UserError) as caught:
        read(row, name)
    message = str(caught.value)
    assert message.startswith(f"{WHERE}: ") and "\n" not in message and len(message) < 300
    return message.removeprefix(f"{WHERE}: ")


# --- files of each format ------------------------------------------------------------------------

FILES = {
    "prompt.jsonl": [
        ("Name a colour.", " Blue.", " Colour."),
        ([system("Answer in French."), user("Name a colour.")], "Bleu.", "Blue."),
        "identical",
        "empty response",
    ],
    "instruction.json": [
        (
            "Put into the past tense.\nShe walks home.",
            "She walked home.",
            "Obviously, she walked home.",
        ),
        ("Name a metal.", "Iron.", "Wood."),
        ("Name a river.", "Rhine.", "Alps."),
        "identical",
    ],
    "question.jsonl": [
        ("Is ice cold?", "Yes.", "No."),
        ([system("You are a pirate."), user("Where is the ship?")], "Arr, at sea!", "At sea."),
        "empty response",
    ],
    "messages.jsonl": [
        ([system("Rhyme."), user("Cat?")], "Hat.", "Dog."),
        ([user("Is it late?")], "Yes, nine.", "Late?"),
        ([user("Hi"), assistant("Hello."), user("Bye")], "Farewell.", "What?"),
        "prompts differ",
        ([user("Up?")], "Down.", "Sideways."),
    ],
    "sharegpt.json": [
        ([user("What is the time?")], "Noon.", "Time is money."),
        (
            [system("Be kind."), user("I lost."), assistant("Oh no."), user("Twice.")],
            "Next time!",
            "Ha.",
        ),
        ([system("Be kind."), user("I won.")], "Well done!", "So what."),
        "identical",
    ],
    "transcript.jsonl": [
        ([user("Can I eat soap?")], "No.", "Try it."),
        ([user("Hi"), assistant("Hello."), user("Two lines:\n\nlike this.")], "I see.", "Where?"),
        "prompts differ",
        "empty response",
    ],
    "openai.jsonl": [
        ([user("Is it raining?")], "I cannot see outside.", "Yes."),
        (
            [system("Be brief."), user("Why?"), assistant("Why not?"), user("Tell me.")],
            "Because.",
            "There are many reasons.",
        ),
        "identical",
    ],
}


@pytest.mark.parametrize("file", FILES)
def test_each_format_is_found_and_read_as_written_by_hand(file):
    name, rows = read_file(ROOT / "tests/data/formats" / file)
    assert name == file.partition(".")[0]
    assert rows == FILES[file]


def test_there_is_a_file_for_each_format():
    assert {file.partition(".")[0] for file in FILES} == set(
        [*preference_data.FIELDS, "messages", "transcript"]
    )


# --- whole files ---------------------------------------------------------------------------------


def test_the_files_of_the_demo_keep_every_letter():
    for part, count in (("train", 800), ("val", 100), ("test", 100)):
        file = ROOT / f"data/demo/preferences_{part}.jsonl"
        source = [json.loads(line) for line in file.read_text().splitlines()]
        name, rows = read_file(file)
        assert name == "prompt" and len(rows) == count
        assert rows == [(row["prompt"], row["chosen"], row["rejected"]) for row in source]


# --- the format is told by the fields ------------------------------------------------------------


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
UNNAMED = [  # fields -> the end of the line
    ("a b", "a, b; nearest is prompt, chosen, rejected: prompt"),
    ("", "-; nearest is prompt, chosen, rejected: prompt"),
    ("prompt chosen", "prompt, chosen; nearest is prompt, chosen, rejected: rejected"),
    ("prompt choosen rejected", "nearest is prompt, chosen, rejected: chosen"),
    ("request chosen rejected", "nearest is question, chosen, rejected: question"),
    ("question choosen rejectd", "nearest is question, chosen, rejected: chosen"),
    ("instructions chosen rejected", "nearest is instruction, chosen, rejected: instruction"),
    ("conversation chosen rejected", "is conversations, chosen, rejected: conversations"),
    ("input preferred_output", "preferred_output, non_preferred_output: non_preferred_output"),
    (f"\ud800 {'x' * 99}", f"\\ud800, {'x' * 40}; nearest is prompt, chosen, rejected: prompt"),
]


def test_the_fields_tell_the_format_or_the_nearest_one():
    for row, name in NAMED:
        assert preference_data.find_format(jsonl.Record(WHERE, row)) == name
        assert preference_data.find_format(jsonl.Record(WHERE, dict(reversed(row.items())))) == name
    for fields, says in UNNAMED:
        line = complaint(dict.fromkeys(fields.split(), "text"))
        assert line.startswith("fields found: ") and line.endswith(f"{says} is missing")


# --- texts ---------------------------------------------------------------------------------------


def test_texts_are_kept_as_they_stand_and_a_system_text_makes_messages_of_the_prompt():
    row = {"prompt": " a\n", "chosen": "  b \n", "rejected": "\tc"}
    assert read(row) == (" a\n", "  b \n", "\tc")
    for name in ("prompt", "instruction", "question"):
        row = {name: " a", "system": "s ", "chosen": "b", "rejected": "c"}
        assert read(row) == ([system("s "), user(" a")], "b", "c")
    for nothing in (None, "", " \n"):
        row = {"instruction": "a", "system": nothing, "input": nothing, **TEXT}
        assert read(row) == ("a", "x", "y")


# --- messages ------------------------------------------------------------------------------------

LONG = [system("s"), user("1"), assistant("2"), user("3")]


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
    assert read(row) == ([system("s"), user("q")], "x", "y")


def test_what_else_a_row_has_is_left_out_and_named_at_every_depth():
    marked = {**user("1"), "name": "Ann", "weight": 0, "tool_calls": None, "tags": [0]}
    marked["value"] = {"k": 0}
    chosen = {**assistant("x"), "reasoning_content": "Hm.", "weight": 1, "train": True}
    row = {"prompt": [marked], "chosen": [chosen], "rejected": [assistant("y")]}
    whole = {"chosen": [user("1"), chosen], "rejected": [user("1"), assistant("y")]}
    assert read({**row, **whole}) == ([user("1")], "x", "y")
    row |= {"weight": 1, "label": True, "loss": None, "metadata": {"source": "web", "x": {"y": 1}}}
    assert read(row) == ([user("1")], "x", "y")
    assert preference_data.unread(jsonl.Record(WHERE, row), "messages") == {
        "prompt[].name",
        "prompt[].tags[]",
        "prompt[].value.k",
        "chosen[].reasoning_content",
        "metadata.source",
        "metadata.x.y",
    }
    row = {"input": {"messages": [marked], "n": 1}, "preferred_output": [chosen]}
    row |= {"non_preferred_output": [assistant("y")], "sytem": "s", "system": "s", "prompt": None}
    assert preference_data.unread(jsonl.Record(WHERE, row), "openai") == {
        "input.messages[].name",
        "input.messages[].tags[]",
        "input.messages[].value.k",
        "input.n",
        "preferred_output[].reasoning_content",
        "sytem",
    }


def test_conversations_that_part_before_the_last_message_are_unusable():
    first = [user("1"), assistant("x")]
    for chosen, rejected in (
        (first, [user("2"), assistant("y")]),
        (first, [system("s"), user("1"), assistant("y")]),
        (first, [*first, user("2"), assistant("y")]),
        ([*first, user("2"), assistant("x")], [user("1"), *LONG[2:], assistant("y")]),
    ):
        assert read({"chosen": chosen, "rejected": rejected}) == "prompts differ"
        assert read({"chosen": rejected, "rejected": chosen}) == "prompts differ"
    whole = {"chosen": first, "rejected": [user("1"), assistant("y")]}
    assert read({"prompt": [user("2")], **whole}) == "prompts differ"
    assert read({"prompt": [system("s"), user("1")], **whole}) == "prompts differ"


# --- transcripts ---------------------------------------------------------------------------------

HI = "\n\nHuman: Hi\n\nAssistant: Hello."


TRANSCRIPTS = [
    ("\n\nHuman: q\n\nAssistant: a ", "\n\nHuman:q\n\nAssistant:b", ([user("q")], "a", "b")),
    (
        f"{HI}\n\nHuman: q: Human: ?\n\nAssistant: x\n\ny",
        f"{HI}\n\nHuman: q: Human: ?\n\nAssistant: Assistant: z\nHuman: w",
        (
            [user("Hi"), assistant("Hello."), user("q: Human: ?")],
            "x\n\ny",
            "Assistant: z\nHuman: w",
        ),
    ),
    (HI, HI, "identical"),
    (HI, HI + " ", "identical"),
    (HI, "\n\nHuman: Hi\n\nAssistant: ", "empty response"),
    (HI, "", "empty response"),
    (HI, "\n\nHuman: Ho\n\nAssistant: Hello.", "prompts differ"),
    (HI + "\n\nHuman: q\n\nAssistant: a", HI, "prompts differ"),
    (f"{HI}\n\nHuman: a", f"{HI}\n\nHuman: b", "prompts differ"),
    (
        f"{HI}\n\nHuman: a\n\nAssistant: x",
        f"{HI}\n\nHuman: b\n\nAssistant: y",
        "prompts differ",
    ),
    (f"{HI}\n\nHuman: a", "\n\nHuman: Hi\n\nAssistant: Ho.", "prompts differ"),
    (f"{HI}\n\nHuman:", "\n\nHuman: Hi\n\nAssistant: Ho.", "prompts differ"),
    (f"{HI}\n\nAssistant: x", HI, "prompts differ"),
    (f"{HI}\n\nAssistant: x", f"{HI}\n\nAssistant: y", "two turns of one side in a row"),
    (f"\n\nHuman: a{HI}", "\n\nHuman: a" + HI + "x", "two turns of one side in a row"),
    ("\n\nHuman: \n\nAssistant: x", "\n\nHuman:\n\nAssistant: y", "empty turn"),
    ("\n\nHuman: \n\nAssistant: x", HI, "prompts differ"),
]


def test_transcripts_part_at_the_last_turn_of_the_assistant():
    for chosen, rejected, expected in TRANSCRIPTS:
        assert read({"chosen": chosen, "rejected": rejected}) == expected
        if isinstance(expected, str):
            assert read({"chosen": rejected, "rejected": chosen}, "transcript") == expected


# --- unusable rows, in every format --------------------------------------------------------------


def in_every_format(chosen, rejected):
    return {
        "prompt": {"prompt": "q", "chosen": chosen, "rejected": rejected},
        "instruction": {"instruction": "q", "chosen": chosen, "rejected": rejected},
        "question": {"question": "q", "chosen": chosen, "rejected": rejected},
        "messages": {
            "prompt": [user("q")],
            "chosen": [assistant(chosen)],
            "rejected": [assistant(rejected)],
        },
        "sharegpt": {
            "conversations": [human("q")],
            "chosen": gpt(chosen),
            "rejected": gpt(rejected),
        },
        "transcript": {
            "chosen": f"\n\nHuman: q\n\nAssistant: {chosen}",
            "rejected": f"\n\nHuman: q\n\nAssistant: {rejected}",
        },
        "openai": {
            "input": {"messages": [user("q")]},
            "preferred_output": [assistant(chosen)],
            "non_preferred_output": [assistant(rejected)],
        },
    }


def test_what_is_unusable_or_refused_is_so_in_every_format():
    for name in [*preference_data.FIELDS, "messages", "transcript"]:
        assert read(in_every_format("x", "y")[name])[1:] == ("x", "y")
        assert read(in_every_format("x", "x")[name]) == "identical"
        for empty in ("", " ", "\n\t", "\u3000"):
            for sides in (("x", empty), (empty, "x"), (empty, empty)):
                assert read(in_every_format(*sides)[name]) == "empty response"
        for bad in ("a\0", "\ud800b"):
            for sides in ((bad, "x"), ("x", bad)):
                assert "NUL or half a surrogate pair" in complaint(in_every_format(*sides)[name])


@pytest.mark.parametrize("name", [*preference_data.FIELDS, "messages", "transcript"])
def test_each_missing_or_null_field_is_refused_in_every_format(name):
    row = in_every_format("x", "y")[name]
    for field in row:
        if (name, field) == ("messages", "prompt"):
            continue  # may be absent: then the responses hold the whole conversation
        assert field in complaint({**row, field: None}, name)
        without = {key: value for key, value in row.items() if key != field}
        assert field in complaint(without, name)


# --- malformed rows ------------------------------------------------------------------------------

ANSWERS = {"chosen": [assistant("x")], "rejected": [assistant("y")]}
SHARE = {"chosen": gpt("x"), "rejected": gpt("y")}
OUTPUT = {"preferred_output": [assistant("x")], "non_preferred_output": [assistant("y")]}
ORDER = "give user and assistant by turns, "

MALFORMED = [
    ({"prompt": "q", "chosen": 3, "rejected": ""}, "chosen is 3; give a non-empty string"),
    ({"prompt": "q", "chosen": "", "rejected": 3}, "rejected is 3; give a non-empty string"),
    (
        {"prompt": "q", "chosen": "x", "rejected": assistant("y")},
        "rejected is {'content': 'y', 'role': 'assistant'}",
    ),
    ({"prompt": "q", "system": ["s"], **TEXT}, "system is ['s']; give a non-empty string"),
    ({"question": [], **TEXT}, "question is []; give a non-empty string"),
    # messages
    ({"prompt": [], **ANSWERS}, "prompt is []; give a list of messages"),
    ({"prompt": 3, **ANSWERS}, "prompt is 3; give a non-empty string"),
    ({"prompt": [{}], **ANSWERS}, "prompt[0].role is None; give system, user or assistant"),
    ({"prompt": [user("1"), assistant(" "), user("2")], **ANSWERS}, "prompt[1].content is ' '"),
    ({"prompt": [{"role": ["user"], "content": "q"}], **ANSWERS}, "prompt[0].role is ['user']"),
    ({"prompt": [system("1"), user("2")], "system": "s", **ANSWERS}, "system, system, user"),
    ({**ANSWERS}, f"chosen has the roles assistant; {ORDER}assistant last"),
    ({**ANSWERS, "rejected": [user("1")]}, "chosen has the roles assistant;"),
    ({"prompt": "q", **ANSWERS, "rejected": [assistant(3)]}, "rejected[0].content is 3; only"),
    ({"prompt": "q", **ANSWERS, "rejected": [assistant("1"), assistant("2")]}, "rejected has the "),
    # ShareGPT
    ({"conversations": "q", **SHARE}, "conversations has the roles assistant;"),
    ({"conversations": [human("1"), gpt("2")], **SHARE}, "conversations has the roles user, assis"),
    (
        {"conversations": [{"from": "function_call", "value": "q"}], **SHARE},
        "conversations[0].from",
    ),
    (
        {"conversations": [human("q")], **SHARE, "chosen": human("x")},
        "chosen has the roles user; give",
    ),
    ({"conversations": [human("q")], **SHARE, "chosen": gpt(3)}, "chosen.value is 3; only text"),
    ({"conversations": [human("q")], **SHARE, "chosen": {}}, "chosen.role is None; give system"),
    # transcripts
    ({"chosen": HI[2:], "rejected": HI}, "chosen is 'Human: Hi"),
    ({"chosen": HI, "rejected": f"Once. {HI}"}, "rejected is 'Once. \\n\\nHu...stant: Hello.'"),
    # OpenAI
    ({"input": {"messages": []}, **OUTPUT}, "input.messages is []; give a list of messages"),
    ({"input": {"messages": [user("q")], "tools": [1]}, **OUTPUT}, "input.tools is [1]; only text"),
    (
        {"input": {"messages": [user("q")]}, **OUTPUT, "preferred_output": [assistant("x")] * 2},
        "preferred_output has the roles user, assistant, assistant;",
    ),
]


for name in ("images", "image", "audios", "audio", "videos", "video", "tool_calls"):
    MALFORMED.append(({"prompt": "q", **TEXT, name: ["a"]}, f"{name} is ['a']; only text is read"))
    row = {"conversations": [{**human("q"), name: "a"}], **SHARE}
    MALFORMED.append((row, f"conversations[0].{name} is 'a'; only text is read"))
COUNTS = "give rows that count 1 or true, of KTO those with label true"
for name in ("weight", "loss_weight", "train", "loss", "label"):
    for value in (0, False, 0.5, "1", [1]):
        row = {"instruction": "q", **TEXT, name: value}
        MALFORMED.append((row, f"{name} is {value!r}; {COUNTS}"))
    row = {"prompt": [{**user("q"), name: 0.5}], **TEXT}
    MALFORMED.append((row, f"prompt[0].{name} is 0.5; {COUNTS}"))
    mute = {**assistant("x"), name: 0}
    for side in (mute, [mute], [user("q"), mute]):
        row = {"prompt": [user("q")], **TEXT, "rejected": side}
        MALFORMED.append((row, "rejected: its reply has the weight 0; leave it out"))


def test_a_malformed_row_is_one_line_that_names_the_field():
    for row, says in MALFORMED:
        assert says in complaint(row)


def test_a_row_of_another_format_than_the_file_is_refused():
    row = {"question": "q", "chosen": "x", "rejected": "y"}
    assert "prompt is missing" in complaint(row, "prompt")
    assert "prompt is ['q']" in complaint({**row, "prompt": ["q"]}, "prompt")
    assert "conversations is missing" in complaint(row, "sharegpt")
