"""Tools, thoughts and roles in a conversation: the ids and masks that transformers' own has."""

import copy
import json

import pytest
from test_pairs import GEMMA, LLAMA3, chat_tokenizer, tokenizer

import reading
from ddp_utils import UserError
from lm.chat_template import Encoder

TOOLS = (  # in the manner of Qwen: tools, calls and thoughts; {% generation %} marks the replies
    "{% if tools %}<|h|>tools{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|eot|>\n"
    "{% endif %}{% for m in messages %}<|h|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}{% for call in m.tool_calls or [] %}[{{ call.function.name }} "
    "{{ call.function.arguments | tojson }}]{% endfor %}<|eot|>{% endgeneration %}\n"
    "{% else %}{{ m.content }}<|eot|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|h|>assistant\n{% if short %}<think></think>{% endif %}"
    "{% endif %}"
)
TRIMMED = (
    "{% for m in messages %}<|h|>{{ m.role }}\n{{ m.content | trim }}<|eot|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|h|>assistant\n{% endif %}"
)
# in the manner of gpt-oss: a reply that ends with a call has an end of its own
CALL_END = TOOLS.replace(
    "<|eot|>{% endgen", "{% if m.tool_calls %}<|/h|>{% else %}<|eot|>{% endif %}{% endgen"
)
SCHEMAS = [{"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}]
CALLS = [{"type": "function", "function": {"name": "time", "arguments": {"zone": "CET"}}}]


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


ASKED = turn("user", "Time?")
SINGLE = [turn("user", "Why?"), turn("assistant", "Because.\n")]
MULTI = [*SINGLE, turn("user", "So?"), turn("assistant", " Yes.")]
BE_KIND = [turn("system", "Be kind.")]
CALLED = [ASKED, turn("assistant", "", tool_calls=CALLS)]
ANSWERED = [*CALLED, turn("tool", "12:00", name="time"), turn("assistant", "Noon.")]
THOUGHT = [ASKED, turn("assistant", "Noon.", reasoning_content="Hm.")]
PARTS = [turn("user", [{"type": "text", "text": "Ti"}, {"type": "text", "text": "me?"}]), SINGLE[1]]
ROWS = {
    "single": {"messages": SINGLE},
    "multi-turn": {"messages": MULTI},
    "system": {"messages": [turn("system", "Be kind."), *MULTI]},
    "an empty system": {"messages": [turn("system", ""), *MULTI]},
    "a call and an empty answer": {
        "messages": [*CALLED, turn("tool", "", name="time"), turn("assistant", "Noon.")],
        "tools": SCHEMAS,
    },
    "developer": {"messages": [turn("developer", "Be kind."), *SINGLE]},
    "parts": {"messages": PARTS},
    "a call": {"messages": CALLED, "tools": SCHEMAS},
    "a call and its answer": {"messages": ANSWERED, "tools": SCHEMAS},
    "tools as text": {"messages": ANSWERED, "tools": json.dumps(SCHEMAS)},
    "a thought": {"messages": THOUGHT},
    "thoughts": {"messages": [*THOUGHT, *THOUGHT]},
    "the assistant first": {"messages": [turn("assistant", "Hello!"), *MULTI]},
    "system, the assistant first": {"messages": [*BE_KIND, turn("assistant", "Hello!"), *MULTI]},
    "system alone": {"messages": [*BE_KIND, turn("assistant", "I am.")]},
    "two users": {"messages": [*SINGLE, ASKED, *MULTI]},
    "two users first": {"messages": [ASKED, *MULTI]},
    "an argument": {"messages": SINGLE, "chat_template_kwargs": {"short": False}},
}
TEMPLATES = {
    "tools": TOOLS,
    "tools, ends of calls": CALL_END,
    "any role": LLAMA3,
    "trimmed": TRIMMED,
}
ONLY_TOOLS = {name for name in ROWS if "call" in name or "tool" in name or "thought" in name}


def read(tmp_path, row, template, reader=reading.texts):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    tok = chat_tokenizer(template) if template else tokenizer()
    return reader(path, Encoder(tok))[0][0], tok


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", ROWS)
def test_ids_and_masks_are_those_of_transformers(tmp_path, name, template):
    row = ROWS[name]
    if "tools" not in template and name in ONLY_TOOLS:
        with pytest.raises(UserError, match="rows.jsonl:1: .*(tools|reasoning_content)"):
            read(tmp_path, row, TEMPLATES[template])
        return
    text, tok = read(tmp_path, row, TEMPLATES[template])
    messages = copy.deepcopy(row["messages"])
    for message in messages:
        if isinstance(message["content"], list):
            message["content"] = "".join(part["text"] for part in message["content"])
    options = dict(row.get("chat_template_kwargs", {}))
    if "tools" in row:
        options["tools"] = SCHEMAS
    if "tools" in template:
        options["return_assistant_tokens_mask"] = True
    own = tok.apply_chat_template(messages, return_dict=True, **options)
    ids = text.prompt + text.reply
    assert own["input_ids"][: len(ids)] == ids
    assert tok.decode(own["input_ids"][len(ids) :]).strip() == ""  # behind the last reply
    if "tools" in template:
        scored = [0] * len(text.prompt) + text.scored
        assert own["assistant_masks"][: len(ids)] == scored
        assert not any(own["assistant_masks"][len(ids) :])


def test_arguments_of_a_call_may_be_a_text_as_openai_writes_them(tmp_path):
    function = {"name": "time", "arguments": '{"zone": "CET"}'}
    row = {"messages": [ASKED, turn("assistant", None, tool_calls=[{"function": function}])]}
    text, tok = read(tmp_path, row, TOOLS)
    assert tok.decode(text.reply) == '[time {"zone": "CET"}]<|eot|>'
    function["arguments"] = "{zone"
    with pytest.raises(UserError, match=r"rows.jsonl:1: messages\[1\].tool_calls:1:2: not JSON"):
        read(tmp_path, row, TOOLS)


def test_a_call_in_the_older_form_of_openai_is_a_call(tmp_path):
    answer = turn("tool", "12:00", name="time")
    rows = []
    for call, role in (
        ({"tool_calls": CALLS}, "tool"),
        ({"function_call": CALLS[0]["function"]}, "function"),
        ({"function_call": CALLS[0]["function"], "tool_calls": []}, "function"),
    ):
        asked = [ASKED, turn("assistant", None, **call), {**answer, "role": role}]
        rows.append({"messages": [*asked, turn("assistant", "Noon.")], "tools": SCHEMAS})
    texts = [read(tmp_path, row, TOOLS)[0] for row in rows]
    assert texts[0][:3] == texts[1][:3] == texts[2][:3]
    row = {"messages": [ASKED, turn("assistant", None, function_call="time")]}
    with pytest.raises(UserError, match=r"messages\[1\].tool_calls: must be \[{\"function"):
        read(tmp_path, row, TOOLS)


# in the manner of gpt-oss: a header before each part, and no thought of an earlier turn once there
# is a final reply
DROPS_THOUGHTS = (
    "{% for m in messages %}<|h|>{{ m.role }}{% if m.role == 'assistant' %}"
    "{% if m.reasoning_content and (loop.last or messages[-1].role != 'assistant') %}"
    "[thought]{{ m.reasoning_content }}<|/h|><|h|>assistant{% endif %}"
    "[final]{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}"
    "{% else %}\n{{ m.content }}{% endif %}<|eot|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|h|>assistant{% endif %}{# tools #}"
)


@pytest.mark.parametrize("reader", [reading.texts, reading.pairs], ids=["sft", "dpo"])
def test_a_reply_after_a_call_whose_thought_is_dropped_keeps_its_header(reader, tmp_path):
    called = turn("assistant", "", reasoning_content="I ask.", tool_calls=CALLS)
    asked = [ASKED, called, turn("tool", "12:00", name="time")]
    for reply, expected in (
        (turn("assistant", "Noon."), "[final]Noon.<|eot|>"),
        (
            turn("assistant", "Noon.", reasoning_content="Hm."),
            "[thought]Hm.<|/h|><|h|>assistant[final]Noon.<|eot|>",
        ),
    ):
        row = {"messages": [*asked, reply]}
        if reader is reading.pairs:
            row = {"prompt": asked, "chosen": [reply], "rejected": "No."}
        found, tok = read(tmp_path, row, DROPS_THOUGHTS, reader)
        ids = found.chosen if reader is reading.pairs else found.reply  # which has the call, too
        before = tok.decode(found.prompt + ids).removesuffix(expected)
        assert before.endswith("12:00<|eot|>\n<|h|>assistant") and "[thought]I ask." in before
        assert reader is reading.texts or tok.decode(ids) == expected


def test_roles_have_the_names_of_public_data(tmp_path):
    """Such as NeMo's with a capital letter; LLaMA-Factory has a role for calls."""
    calls = [{"function": {"name": "time", "arguments": {"zone": "CET"}}}]
    asked = [ASKED, turn("assistant", "", tool_calls=calls), turn("tool", "12:00")]
    expected, _ = read(tmp_path, {"messages": [*asked, SINGLE[1]], "tools": SCHEMAS}, TOOLS)
    call = '{"name": "time", "arguments": {"zone": "CET"}}'
    for user, caller, tool, assistant in (
        ("User", "function_call", "observation", "Assistant"),
        ("human", "function_call", "tool_response", "model"),
        ("user", "Function_Call", "ipython", "chatgpt"),
    ):
        names = user, caller, tool, assistant
        texts = ASKED["content"], call, "12:00", SINGLE[1]["content"]
        row = [{"from": who, "value": text} for who, text in zip(names, texts, strict=True)]
        text, _ = read(tmp_path, {"conversations": row, "tools": SCHEMAS}, TOOLS)
        assert text[:3] == expected[:3]


def test_thoughts_that_the_template_has_under_another_name_are_one_line(tmp_path):
    row = {"messages": [ASKED, turn("assistant", "Noon.", thinking="Hm.")]}
    message = "does not support thinking; it reads reasoning_content: rename the field"
    with pytest.raises(UserError, match=message):
        read(tmp_path, row, TOOLS)


def test_a_row_may_have_arguments_that_say_nothing(tmp_path):
    """As each row of smoltalk2 has; a template without the word does what it says."""
    nothing = {"custom_instructions": "", "python_tools": [], "enable_thinking": False, "x": None}
    plain, _ = read(tmp_path, {"messages": SINGLE}, TOOLS)
    row = {"messages": SINGLE, "chat_template_kwargs": nothing}
    assert read(tmp_path, row, TOOLS)[0][:3] == plain[:3]
    row["chat_template_kwargs"] = nothing | {"custom_instructions": "Be kind."}
    problem = "rows.jsonl:1: chat_template_kwargs: the chat template does not use custom_instructi"
    with pytest.raises(UserError, match=f"{problem}.*use --columns ignored_chat_template_kwargs="):
        read(tmp_path, row, TOOLS)
    encoder = Encoder(chat_tokenizer(TOOLS))  # a word that the template has is never left out
    for value in (False, "", None):
        assert encoder.check_arguments({"short": value}, "row") == {"short": value}
    kwargs = {"enable_thinking": False}  # as a flag, it may be a mistake
    with pytest.raises(UserError, match="--chat_template_kwargs: the chat template does not use"):
        Encoder(chat_tokenizer(TOOLS), kwargs=kwargs)


def test_calls_in_fields_that_nobody_reads_are_a_warning(tmp_path):
    """As in Dolci, with a template that shows no such field."""
    asked = turn("user", "Time?", functions="f(zone)")
    replied = turn("assistant", "Let me look.", function_calls="f(CET)")
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": [asked, replied]}))
    _, report = reading.texts(path, Encoder(chat_tokenizer(TRIMMED)))
    lines = reading.preference_data.describe_all({"train": report}, {"val": [1]})
    expected = "warning: train: messages[].function_calls, messages[].functions: not read in the"
    assert [line for line in lines if line.startswith(expected)]


def test_earlier_calls_that_are_not_trained_are_a_warning(tmp_path):
    """The template leaves out what is not the last reply, as Qwen3's does for its thoughts."""
    last = TOOLS.replace("{% if m.tool_calls %}", "").replace(
        "{{ m.content }}{% for call", "{% if loop.last %}<t>{% endif %}{{ m.content }}{% for call"
    )
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": ANSWERED, "tools": SCHEMAS}))
    _, report = reading.texts(path, Encoder(chat_tokenizer(last)))
    lines = reading.preference_data.describe_all({"train": report}, {"val": [1]})
    expected = "warning: train: 1 of 1 rows have earlier replies, perhaps tool calls, that are not"
    assert [line for line in lines if line.startswith(expected)], lines


@pytest.mark.parametrize("name", ["args", "parameters", "input"])
@pytest.mark.parametrize("nested", [True, False])
def test_the_arguments_of_a_call_have_other_names(name, nested, tmp_path):
    """As LangChain, Llama and Anthropic write them."""
    function = {"name": "time", name: {"zone": "CET"}}
    calls = [{"type": "function", "function": function} if nested else function]
    row = {"messages": [ASKED, turn("assistant", "", tool_calls=calls)]}
    text, tok = read(tmp_path, row, TOOLS)
    assert tok.decode(text.reply).startswith('[time {"zone": "CET"}]')


def test_a_reply_that_axolotl_does_not_train_is_read_only(tmp_path):
    untrained = turn("assistant", "Wait.", training=False)
    text, tok = read(tmp_path, {"messages": [ASKED, untrained, ASKED, SINGLE[1]]}, TOOLS)
    assert "Wait." in tok.decode(text.prompt) and tok.decode(text.reply).startswith("Because.")


def test_a_template_gets_the_fields_of_messages_that_it_shows(tmp_path):
    """OLMo's template shows functions of a message; ids and notes are for people."""
    shows = "{% if m['functions'] %}[{{ m['functions'] }}]{% endif %}{{ m.role }}"
    template = TOOLS.replace("{{ m.role }}", shows)
    asked = turn("user", "Time?", functions="f(zone)", id=7)
    replied = turn("assistant", "Noon.", functions="g()", note="good")
    [text, tok] = read(tmp_path, {"messages": [asked, replied]}, template)
    own = tok.apply_chat_template([asked, replied], return_dict=False)
    assert text.prompt + text.reply == own[: text.num_tokens]
    assert "[f(zone)]user" in tok.decode(text.prompt)
    path = tmp_path / "rows.jsonl"
    report = reading.texts(path, Encoder(chat_tokenizer(template)))[1]
    assert report["fields_not_read"] == "messages[].id, messages[].note"


def test_no_tools_may_be_an_empty_text_as_in_a_table(tmp_path):
    for nothing in ("", " ", None, []):
        text, tok = read(tmp_path, {"messages": SINGLE, "tools": nothing}, TOOLS)
        assert text == read(tmp_path, {"messages": SINGLE}, TOOLS)[0]


def test_a_call_ends_as_the_template_ends_it(tmp_path):
    row = {"prompt": [ASKED], "chosen": CALLED[1:], "rejected": "No.", "tools": SCHEMAS}
    pair, tok = read(tmp_path, row, CALL_END, reading.pairs)
    assert tok.decode(pair.chosen) == '[time {"zone": "CET"}]<|/h|>'
    assert tok.decode(pair.rejected) == "No.<|eot|>"
    ends = tok.convert_tokens_to_ids(["<|eot|>", "<|/h|>", "</s>"])
    assert Encoder(tok).ends == ends  # sampling stops there as well
    assert Encoder(chat_tokenizer(TOOLS)).ends == [ends[0], ends[2]]


# in the manner of DeepSeek
ADDED = TOOLS.replace(
    "{{ call.function.arguments | tojson }}", "{{ '' + call.function.arguments }}"
)
PRINTED = TOOLS.replace("arguments | tojson", "arguments")  # Python's text of an object is not JSON


@pytest.mark.parametrize("template", [TOOLS, ADDED, PRINTED])
@pytest.mark.parametrize("arguments", [{"zone": "CET"}, '{"zone":"CET"}', "", None])
def test_a_template_gets_the_arguments_of_a_call_in_the_form_that_it_renders(
    template, arguments, tmp_path
):
    call = {"function": {"name": "time", "arguments": arguments}}
    row = {"messages": [ASKED, turn("assistant", None, tool_calls=[call])]}
    text, tok = read(tmp_path, row, template)
    expected = json.dumps(arguments or {})
    if isinstance(arguments, str) and arguments:
        expected = '{"zone": "CET"}' if template == TOOLS else arguments  # as it is
    assert tok.decode(text.reply) == f"[time {expected}]<|eot|>"


def test_a_pair_may_prefer_a_call(tmp_path):
    for row in (
        {"prompt": [ASKED], "chosen": CALLED[1:], "rejected": "No.", "tools": SCHEMAS},
        {
            "input": {"messages": [ASKED], "tools": SCHEMAS},
            "preferred_output": CALLED[1:],
            "non_preferred_output": [turn("assistant", "No.")],
        },
    ):
        pair, tok = read(tmp_path, row, TOOLS, reading.pairs)
        assert tok.decode(pair.prompt).endswith("<|h|>user\nTime?<|eot|>\n<|h|>assistant\n")
        assert tok.decode(pair.prompt).startswith('<|h|>tools{"type": "function"')
        assert tok.decode(pair.chosen) == '[time {"zone": "CET"}]<|eot|>'
        assert tok.decode(pair.rejected) == "No.<|eot|>"
        assert json.loads(pair.expected) == CALLS


def test_an_argument_of_a_row_is_of_that_row_alone(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"messages": SINGLE, "chat_template_kwargs": '{"short": true}'}, {"messages": MULTI}]
    path.write_text("\n".join(map(json.dumps, rows)))
    tok = chat_tokenizer(TOOLS)
    texts, report = reading.texts(path, Encoder(tok))
    assert [tok.decode(text.prompt).endswith("<think></think>") for text in texts] == [False, False]
    assert report["fields_not_read"] == ""


NO_TOOLS = "the chat template does not support tool_calls"
LOSSY = "{# tool_calls reasoning_content #}" + LLAMA3
NO_SYSTEM = LLAMA3.replace("in messages", "in messages if m.role != 'system'")
IMAGE = turn("user", [{"type": "image"}])
ALTERNATING = (  # in the manner of Gemma and Mistral
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}" + LLAMA3.split("%}", 1)[1]
)
NO_GREETING = LLAMA3.replace("m.content", "m.content if m.role == 'user' or loop.index > 1")
LAST_USER = LLAMA3.replace(
    "{{ m.content", "{{ messages[-1].content if m.role == 'user' else m.content"
)
UNUSUAL = [
    BE_KIND,
    [turn("assistant", "Hello!"), ASKED],
    [*BE_KIND, turn("assistant", "Hello!"), ASKED],
    [ASKED, ASKED],
    [*SINGLE, ASKED, turn("user", "So?")],
]
GREETED = {"messages": [turn("assistant", "Hello!"), *SINGLE]}
ORDER = "prompt: the chat template does not accept the roles "
NO_RESULTS = TOOLS.replace("{% else %}", "{% elif m.role != 'tool' %}")
REASONING, TEXT = {"type": "reasoning", "text": "Hm."}, {"type": "text", "text": "Noon."}
KWARGS = [{"name": "time", "kwargs": {"zone": "CET"}}]
UNSUPPORTED = [
    (ALTERNATING, GREETED, ORDER + "assistant, user (--chat_template: Roles must alternate); cha"),
    (ALTERNATING, {"messages": [ASKED, *SINGLE]}, ORDER + "user, user (--chat_template: Roles mus"),
    (GEMMA, {"messages": [*BE_KIND, SINGLE[1]]}, ORDER + "system (--chat_template: System role no"),
    (GEMMA, {"messages": [*BE_KIND, *GREETED["messages"]]}, ORDER + "system, assistant, user (it "),
    (NO_GREETING, GREETED, ORDER + "assistant, user (it leaves out a turn); change the turns"),
    (LAST_USER, {"messages": [ASKED, *SINGLE]}, ORDER + "user, user (it leaves out a turn); chang"),
    (None, {"messages": [SINGLE[1]]}, "messages: the roles are assistant (expected"),
    (TOOLS, {"messages": [SINGLE[1], *SINGLE[1:]]}, "messages: the roles are assistant, assistan"),
    (TOOLS, {"messages": [*BE_KIND, *BE_KIND, *SINGLE]}, "messages: the roles are system, system"),
] + [  # template, row, a part of the message
    (None, {"messages": CALLED}, NO_TOOLS),
    (None, {"messages": ANSWERED}, NO_TOOLS),
    (None, {"messages": SINGLE, "tools": SCHEMAS}, "does not use tools; remove it, or use ano"),
    (GEMMA, {"messages": THOUGHT}, "the chat template does not support reasoning_content"),
    (LOSSY, {"messages": CALLED}, "reply: the chat template renders 'time' as ''"),
    (LOSSY, {"messages": THOUGHT}, "reply: the chat template renders 'Hm.' as 'Noon.'"),
    (GEMMA, {"messages": [ASKED, turn("assistant", "1", thinking="Hm.")]}, "support thinking"),
    (NO_SYSTEM, {"messages": [turn("system", "Be kind."), *SINGLE]}, "does not support system"),
    (TOOLS, {"messages": SINGLE, "tools": [float("nan")]}, "tools: must be a list of objects"),
    (TOOLS, {"messages": SINGLE, "tools": {"a": 1}}, "tools: must be a list of objects"),
    (TOOLS, {"messages": SINGLE, "chat_template_kwargs": [1]}, "_kwargs: must be an object"),
    (TOOLS, {"messages": SINGLE, "chat_template_kwargs": {"x": 1}}, "template does not use x"),
    (TOOLS, {"messages": [ASKED, turn("tool", "1"), SINGLE[1]]}, "the roles are user, tool, ass"),
    (TOOLS, {"messages": [*SINGLE, turn("developer", "x"), *SINGLE]}, "the roles are user, ass"),
    (TOOLS, {"messages": [IMAGE, SINGLE[1]]}, "only text is supported"),
    (TOOLS, {"messages": [ASKED, turn("assistant", [REASONING, TEXT])]}, "only text is supported"),
    (
        NO_RESULTS,
        {"messages": ANSWERED},
        ORDER + "user, assistant, tool (it leaves out a turn); ch",
    ),
    (TOOLS, {"messages": [ASKED, turn("assistant", "", tool_calls=KWARGS)]}, "must be calls with"),
    (TOOLS, {"messages": [ASKED, turn("assistant", "1", train_detail=[{}])]}, "train_detail: must"),
    (
        TOOLS,
        {"messages": [ASKED, turn("assistant", "1", reasoning_content=["Hm."])]},
        "non-empty s",
    ),
    (TOOLS, {"messages": [ASKED, turn("assistant", "1", reasoning_content="\ud800")]}, "half surr"),
    (TOOLS, {"messages": [ASKED, turn("assistant", "", tool_calls=[{"name": 1}])]}, "must be [{"),
    (TOOLS, {"messages": SINGLE, "tools": [{"name": "\ud800"}]}, "and half surrogate pairs"),
    (TOOLS, {"messages": SINGLE, "tools": 5}, "tools: must be a list of objects, not 5"),
    (TOOLS, {"messages": [ASKED, turn("assistant", "", tool_calls=[{"id": 1}])]}, "must be [{"),
]


def test_a_greeting_that_the_template_does_not_render_alone_is_not_trained(tmp_path):
    """Qwen3.5's template looks for a question."""
    asks = "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
    template = asks + "{{ raise_exception('No question') }}{% endif %}" + LLAMA3
    text, tok = read(tmp_path, GREETED, template)
    own = tok.apply_chat_template(GREETED["messages"], return_dict=False)
    assert text.prompt + text.reply == own and tok.decode(text.reply) == "Because.\n<|eot|>"


@pytest.mark.parametrize("template", [LLAMA3, TOOLS, TRIMMED, None])
@pytest.mark.parametrize("prompt", UNUSUAL)
def test_a_pair_may_have_turns_in_an_unusual_order(prompt, template, tmp_path):
    replies = {side: [turn("assistant", side)] for side in ("chosen", "rejected")}
    whole = {side: prompt + reply for side, reply in replies.items()}
    for row in ({"prompt": prompt, **replies}, whole, {"prompt": prompt, **whole}):
        pair, tok = read(tmp_path, row, template, reading.pairs)
        if template:
            ids = tok.apply_chat_template([*prompt, *replies["chosen"]], return_dict=False)
            prompt_ids = tok.apply_chat_template(
                prompt, return_dict=False, add_generation_prompt=True
            )
            assert pair.prompt == prompt_ids
            assert pair.prompt + pair.chosen == ids[: len(pair.prompt + pair.chosen)]
            assert tok.decode(ids[len(pair.prompt + pair.chosen) :]).strip() == ""
        else:
            names = {"system": "System", "user": "Human", "assistant": "Assistant"}
            turns = [*prompt, *replies["chosen"]]
            text = "".join(f"\n\n{names[x['role']]}: {x['content']}" for x in turns)
            assert tok.decode(pair.prompt + pair.chosen) == f"<s>{text}</s>"


def test_what_cannot_be_rendered_is_one_line_with_its_row(tmp_path):
    for template, row, part in UNSUPPORTED:
        with pytest.raises(UserError) as caught:
            read(tmp_path, row, template)
        message = str(caught.value)
        assert message.startswith(f"{tmp_path}/rows.jsonl:1: ") and part in message, message
        assert len(message.splitlines()) == 1


@pytest.mark.parametrize("side", ["keep_end", "keep_start"])
def test_of_a_row_that_is_too_long_every_reply_in_the_context_is_trained(side, tmp_path):
    """After its one question there are calls: no older exchange can be dropped."""
    rounds = [turn("assistant", "", tool_calls=CALLS), turn("tool", "12:00", name="time")]
    row = {"messages": [ASKED, *rounds * 4, turn("assistant", "Noon.")], "tools": SCHEMAS}
    whole, tok = read(tmp_path, row, TOOLS)
    ids, scored = whole.prompt + whole.reply, [0] * len(whole.prompt) + whole.scored
    last = len(tok("Noon.<|eot|>", add_special_tokens=False).input_ids)
    for length in (len(ids) - 1, len(ids) // 2):
        places = [*range(len(ids))]
        kept = places[-length:] if side == "keep_end" else places[: length - last] + places[-last:]
        encoder = Encoder(tok, max_length=length, truncation=side)
        [text], report = reading.texts(tmp_path / "rows.jsonl", encoder)
        assert text.prompt + text.reply == [ids[place] for place in kept]
        expected = [0, *[scored[place] for place in kept[1:]]]
        assert [0] * len(text.prompt) + text.scored == expected
        assert text.trained > 2 * last and report["mean_tokens"]["trained"] == text.trained
