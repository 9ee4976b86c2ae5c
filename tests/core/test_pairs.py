"""From text to token ids: seam, BOS and EOS, truncation, splits; real templates as an extra."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import main_distributed
import reading
import train
from conftest import ROOT
from ddp_utils import UserError
from lm import logps, preference_data
from lm.chat_template import Encoder
from lm.logps import Pair
from prompt_baking import trajectories

MERGING = [("Ġ", "y"), ("a", "b"), ("Ċ", "Ċ"), ("1", "2")]  # " y", "ab", two newlines, digits


def tokenizer(bos=True, pad_is_eos=True, merges=MERGING):
    """Bytes plus the given merges: every seam can be made to merge."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<s>", "</s>", *alphabet, *("".join(pair) for pair in merges)]
    vocab = {word: index for index, word in enumerate(words)}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    if bos:
        inner.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<s>" if bos else None,
        eos_token="</s>",
        pad_token="</s>" if pad_is_eos else None,
    )


SEAMS = [
    ("Say", " yes", " no"),
    ("Say ", "yes", "no"),  # trailing space: " y" merges across the seam
    ("xa", "b", "c"),
    ("line\n", "\nnext", "end"),
    ("count 1", "2 3", "4"),
    ("Is it?", "yes", "yes!"),  # one response is the beginning of the other
]


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize(("prompt", "chosen", "rejected"), SEAMS)
def test_complaint_08_no_token_is_lost_or_doubled_at_the_seam(bos, prompt, chosen, rejected):
    tok = tokenizer(bos)
    encoder = Encoder(tok)
    pair = encoder.encode("f:1", prompt, chosen, rejected)[0]
    assert encoder.truncate(pair) is pair
    for response, text in ((pair.chosen, chosen), (pair.rejected, rejected)):
        assert response[-1] == tok.eos_token_id
        assert pair.prompt + response[:-1] == tok(prompt + text).input_ids
    # the prompt is as long as it can be: all leading tokens that the three share
    full = [tok(text).input_ids for text in (prompt, prompt + chosen, prompt + rejected)]
    same = [len(set(ids)) == 1 for ids in zip(*full, strict=False)]
    assert len(pair.prompt) == len(list(itertools.takewhile(bool, same)))


def test_complaint_08_a_merged_token_belongs_to_the_response():
    tok = tokenizer()
    pair, notes = Encoder(tok).encode("f:7", "xa", "b", "c")
    assert notes == {"merged at the seam"}
    tokens = [tok.convert_ids_to_tokens(ids) for ids in pair[:3]]
    assert tokens == [["<s>", "x"], ["ab", "</s>"], ["a", "c", "</s>"]]
    with pytest.raises(UserError, match="prompt: 'a' has no token of its own"):
        Encoder(tokenizer(bos=False)).encode("f:1", "a", "b", "c")


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("prompt", ["hello", "<s>hello", "<s><s>hello"])
def test_complaint_09_at_most_one_bos_and_it_is_first(bos, prompt):
    tok = tokenizer(bos)
    pair = Encoder(tok).encode("f:1", prompt, " x", " y")[0]
    begin = tok.convert_tokens_to_ids("<s>")
    if bos:
        assert (pair.prompt + pair.chosen).count(begin) == 1
        assert pair.prompt[0] == begin
    assert None not in pair.prompt + pair.chosen + pair.rejected


@pytest.mark.parametrize("pad_is_eos", [True, False])
@pytest.mark.parametrize("chosen", [" x", " x</s>", " x</s></s>"])
def test_complaint_10_exactly_one_eos_is_trained_also_where_padding_is_eos(pad_is_eos, chosen):
    tok = tokenizer(pad_is_eos=pad_is_eos)
    pair, _ = Encoder(tok).encode("f:1", "p", chosen, " a much longer answer")
    for shared in (True, False):
        batch = logps.collate([pair], shared=shared)
        for row, response in enumerate((pair.chosen, pair.rejected)):
            trained = batch.targets[batch.cells[0] == row].tolist()
            assert trained == response
            assert trained.count(tok.eos_token_id) == 1 and trained[-1] == tok.eos_token_id


TEXT = st.text(st.sampled_from("ab12 \n\té?y<>/s"), min_size=1, max_size=30)
SIDES = st.sampled_from(["keep_end", "keep_start"])
TOKENIZER = tokenizer()


@settings(max_examples=150, deadline=None)
@given(TEXT, TEXT, TEXT, st.integers(8, 40), SIDES)
def test_complaint_11_every_kept_row_has_a_response_token_and_one_prompt(
    prompt, chosen, rejected, max_length, truncation
):
    row = "f:1", prompt, chosen, rejected
    encoder = Encoder(TOKENIZER, "auto", max_length, truncation)
    whole = encoder.encode(*row)[0]
    pair = encoder.truncate(whole)
    assert pair.prompt and pair.chosen and pair.rejected
    assert len(pair.prompt) + max(len(pair.chosen), len(pair.rejected)) <= max_length
    assert (whole == pair) == (whole.num_tokens <= max_length)
    assert whole.chosen[: len(pair.chosen)] == pair.chosen  # cut at its end, if at all


@pytest.mark.parametrize(("side", "kept"), [("keep_end", "3456789"), ("keep_start", "0123456")])
def test_the_prompt_is_cut_first_and_keeps_its_bos(side, kept):
    tok = tokenizer(merges=[])
    encoder = Encoder(tok, max_length=12, truncation=side)
    pair = encoder.truncate(encoder.encode("f:1", "0123456789", "abc", "de")[0])
    assert tok.convert_ids_to_tokens(pair.prompt) == ["<s>", *kept]
    assert tok.decode(pair.chosen) == "abc</s>"
    # beside a long response a quarter of max_length stays of the prompt
    pair = Pair([3] * 20, [4] * 20, [5] * 14, "f:1", "")
    pair = Encoder(tok, max_length=16, truncation=side).truncate(pair)
    assert [len(part) for part in pair[:3]] == [4, 12, 12]


def test_splits_share_no_prompt_and_do_not_depend_on_the_order_of_rows(tmp_path):
    data = [Pair([1], [2], [3], f"f:{k}", f"prompt {k // 3}") for k in range(300)]

    def prompts(pairs, seed):
        rows = reading.mapped(tmp_path / f"{pairs[0].text}.safetensors", pairs)
        parts = preference_data.split_by_prompt(rows, seed)
        return [{pair.text for pair in part} for part in parts]

    train, val, test = prompts(data, 0)
    assert [len(train), len(val), len(test)] == [85, 5, 10]
    assert len(train | val | test) == 100
    assert prompts(data[::-1], 0) == [train, val, test]
    assert prompts(data, 1)[2] != test


@pytest.mark.parametrize(
    ("script", "flag"), [(main_distributed, "--batch_size=2"), (train, "--micro_batch_size=2")]
)
def test_held_out_prompts_that_are_trained_on_are_counted(script, flag, tmp_path, capsys):
    rows = [{"prompt": f"{n}?", "chosen": "yes", "rejected": "no"} for n in range(6)]
    for name, part in {"train": rows[:4], "val": rows[2:]}.items():  # 2? and 3? are in both
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)))
    flags = ["--check", "--cache_dir", str(tmp_path), flag]
    flags += ["--train_data", f"{tmp_path}/train.jsonl", "--val_data", f"{tmp_path}/val.jsonl"]
    assert script.main(flags) == 0
    lines = capsys.readouterr().out
    assert "; 2 prompts also in train_data\n" in lines
    assert "\nwarning: val: 2 prompts also in train_data; remove these rows from one" in lines


# --- chat templates ------------------------------------------------------------------------------

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|h|>{{ m.role }}<|/h|>\n\n{{ m.content }}<|eot|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|h|>assistant<|/h|>\n\n{% endif %}"
)
GEMMA = (  # no system role, the model's turn is called model, eos is not the end of a turn
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}<|h|>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content }}<|eot|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|h|>model\n{% endif %}"
)
CHATML = (
    "{% for m in messages %}<|h|>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|h|>assistant\n{% endif %}"
)
THINKING = (  # in the manner of Qwen3: the last reply has a thought, an empty one if it brings none
    "{% for m in messages %}<|h|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% set parts = m.content.split('</think>') %}{% if loop.last %}<think>\n"
    "{{ parts[0].split('<think>')[-1].strip() if parts | length > 1 }}\n</think>\n\n{% endif %}"
    "{{ parts[-1].lstrip() }}{% else %}{{ m.content }}{% endif %}<|eot|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|h|>assistant\n{% if enable_thinking is defined and "
    "enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def chat_tokenizer(template, bos=True):
    tok = tokenizer(bos, merges=[])
    tok.add_special_tokens({"additional_special_tokens": ["<|h|>", "<|/h|>", "<|eot|>"]})
    tok.chat_template = template
    return tok


TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "Who?"},
]


RENDERED = json.loads((ROOT / "tests/data/templates_expected.json").read_text())["rendered"]
TEMPLATES = {"llama3": LLAMA3, "gemma": GEMMA, "chatml without bos": CHATML}


@pytest.mark.parametrize("name", RENDERED)
def test_a_conversation_is_rendered_as_the_template_says(name):
    text, end = RENDERED[name]
    tok = chat_tokenizer(TEMPLATES[name], bos="without" not in name)
    encoder = Encoder(tok)
    pair = encoder.encode("f:1", TALK, "Me.", "No.")[0]
    assert tok.decode(pair.prompt + pair.chosen) == text
    assert tok.decode(pair.rejected) == "No." + end
    assert encoder.end == tok.convert_tokens_to_ids(end)
    assert set(encoder.ends) == {encoder.end, tok.eos_token_id}


@pytest.mark.parametrize("arguments", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
@pytest.mark.parametrize("reply", ["Me.", "\n Me. ", "<think>Hm.</think>Me.", "Me.<|eot|>"])
def test_prompt_and_reply_have_the_ids_of_the_conversation_as_transformers_renders_it(
    arguments, reply
):
    tok = chat_tokenizer(THINKING, bos=False)
    encoder = Encoder(tok, kwargs=json.dumps(arguments))
    eot = tok.convert_tokens_to_ids("<|eot|>")
    for prompt in (TALK[1:2], TALK, "Hi"):
        turns = [{"role": "user", "content": prompt}] if prompt == "Hi" else prompt
        pair = encoder.encode("f:1", prompt, reply, "No.")[0]
        options = {"return_dict": False, **arguments}
        whole = [*turns, {"role": "assistant", "content": reply.removesuffix("<|eot|>")}]
        expected = tok.apply_chat_template(whole, **options)
        assert pair.prompt + pair.chosen == expected[: -expected[::-1].index(eot)]
        asked = tok.apply_chat_template(turns, add_generation_prompt=True, **options)
        assert encoder.ids(encoder.text(prompt))[0] == asked
        if "<think>" not in reply or arguments != {"enable_thinking": False}:
            assert pair.prompt == asked
    assert trajectories.prompt(encoder, "", "Hi") == encoder.ids(encoder.text("Hi"))[0]


def test_a_conversation_without_a_template_becomes_a_transcript():
    tok = tokenizer(bos=False, merges=[])
    pair = Encoder(tok).encode("f:1", TALK, "Me.", "No.")[0]
    turns = ["System: Be kind.", "Human: Hi", "Assistant: Hello!", "Human: Who?", "Assistant: Me."]
    expected = "".join(f"\n\n{turn}" for turn in turns) + "</s>"
    assert tok.decode(pair.prompt + pair.chosen) == expected


def test_a_template_from_a_file_and_none_at_all(tmp_path):
    file = tmp_path / "my.jinja"
    file.write_text("[{{ messages[-1].content }}]")
    tok = tokenizer(merges=[], bos=False)
    pair = Encoder(tok, chat_template=str(file)).encode("f:1", "Q", "A", "B")[0]
    assert tok.decode(pair.prompt) == "[Q]"
    pair = Encoder(chat_tokenizer(CHATML), "none").encode("f:1", "Q", "A", "B")[0]
    assert tok.decode(pair.prompt) == "<s>Q"
    with pytest.raises(UserError, match="^--chat_template: no file nowhere.jinja; use"):
        Encoder(tok, "nowhere.jinja")


R1 = (  # drops the thought of a reply, and opens one for a new reply
    "{% for m in messages %}{% if m.role == 'user' %}<|h|>{{ m.content }}{% else %}<|/h|>"
    "{{ m.content.split('</think>')[-1] }}<|eot|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|/h|><think>\n{% endif %}"
)
THOUGHTS = [  # reply -> prompt, reply and end as they are trained
    ("<think>\nhm\n</think>\n\n4", "<|h|>2+2?<|/h|><think>\n", "hm\n</think>\n\n4<|eot|>"),
    (" <think> hm</think>4", "<|h|>2+2?<|/h|><think>\n", "hm</think>4<|eot|>"),
    ("hm\n</think>4", "<|h|>2+2?<|/h|><think>\n", "hm\n</think>4<|eot|>"),
]


@pytest.mark.parametrize(("reply", "prompt", "trained"), THOUGHTS)
def test_a_thought_that_the_template_drops_is_an_error_or_kept(reply, prompt, trained):
    tok = chat_tokenizer(R1, bos=False)
    with pytest.raises(UserError, match=r"^reply: the chat template renders .*hm.* as '.*4'; use"):
        Encoder(tok).encode("f:1", "2+2?", "4", reply)
    encoder = Encoder(tok, keep_thoughts=True)
    pair, notes = encoder.encode("f:1", "2+2?", reply, "<think>\n5")
    assert (tok.decode(pair.prompt), tok.decode(pair.chosen), notes) == (prompt, trained, set())
    # a reply without a thought is trained as the template renders it
    pair, notes = encoder.encode("f:1", "2+2?", "4", "5")
    assert tok.decode(pair.prompt + pair.chosen) == "<|h|>2+2?<|/h|>4<|eot|>"
    assert notes == {"without all of the generation prompt"}


CUT_OFF = [  # reply with a thought, and what was trained of it before an empty thought was added
    ("{# #}", "<think>\nhm, so", "<think>\nhm, so<|eot|>"),
    ("<think>\n", "<think>\nhm, so", "hm, so<|eot|>"),
    ("<think>\n", "<think>\nhm\n</think>\n\n4", "hm\n</think>\n\n4<|eot|>"),
    ("<think>\n", "hm\n</think>\n\n4", "hm\n</think>\n\n4<|eot|>"),
]


@pytest.mark.parametrize(("opening", "reply", "trained"), CUT_OFF)
def test_a_reply_with_a_thought_gets_no_empty_one_before_it(opening, reply, trained):
    """As Qwen3 does it if a thought has no end, and Qwen3.8 for all thoughts within the text."""
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<|h|>{{ m.content }}<|/h|>{% else %}"
        "<think>\n\n</think>\n\n{{ m.content }}<|eot|>{% endif %}{% endfor %}"
    )
    template += "{% if add_generation_prompt %}" + opening + "{% endif %}"
    tok = chat_tokenizer(template, bos=False)
    pair, _ = Encoder(tok).encode("f:1", "2+2?", reply, "<think>\n5")
    assert tok.decode(pair.chosen) == trained
    pair, _ = Encoder(tok).encode("f:1", "2+2?", "4", "5")  # without a thought it gets one
    assert tok.decode(pair.prompt + pair.chosen).endswith("<think>\n\n</think>\n\n4<|eot|>")


MOVING = (  # in the manner of Mistral: the system text is in the last turn, if that is the user's
    "{% set s = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}"
    "{% for m in messages %}{% if m.role == 'user' %}[{{ (s if loop.last else '') + m.content }}]"
    "{% elif m.role == 'assistant' %} {{ m.content | trim }}<|eot|>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("prompt", ["Hi", TALK[:2], TALK])
@pytest.mark.parametrize("reply", ["Me.", " Me."])
def test_a_template_that_moves_the_system_turn_writes_the_same_replies(prompt, reply):
    tok = chat_tokenizer(MOVING, bos=False)
    pair = Encoder(tok).encode("f:1", prompt, reply, "No.")[0]
    turns = [{"role": "user", "content": prompt}] if prompt == "Hi" else prompt
    assert pair.prompt == tok.apply_chat_template(turns, return_dict=False)
    assert [tok.decode(ids) for ids in pair[1:3]] == [" Me.<|eot|>", " No.<|eot|>"]


PARTS = (  # in the manner of SmolVLM: a text would be rendered as nothing
    "{% for m in messages %}{{ '<|h|>' if m.role == 'user' else '' }}{% for c in m.content %}"
    "{% if c.type == 'text' %}{{ c.text }}{% endif %}{% endfor %}"
    "{{ '<|/h|>' if m.role == 'user' else '<|eot|>' }}{% endfor %}"
)


def test_a_template_that_expects_parts_gets_them():
    tok = chat_tokenizer(PARTS, bos=False)
    pair = Encoder(tok).encode("f:1", "2+2?", "4", "5")[0]
    assert [tok.decode(ids) for ids in pair[:3]] == ["<|h|>2+2?<|/h|>", "4<|eot|>", "5<|eot|>"]
    with pytest.raises(UserError, match="^--chat_template: it renders no text of a reply"):
        Encoder(chat_tokenizer("{{ messages[0].content }}"))


NAMED = {"default": CHATML, "tool_use": "{{ tools }}" + LLAMA3}


@pytest.mark.parametrize(("choice", "name"), [("auto", "default"), ("tool_use", "tool_use")])
def test_one_of_several_templates_is_used_and_all_are_saved(choice, name, tmp_path):
    tok = chat_tokenizer(dict(NAMED))
    expected = tok.apply_chat_template(TALK, chat_template=name, return_dict=False)
    encoder = Encoder(tok, choice)
    assert encoder.ids(encoder.render(TALK))[0] == expected
    tok.save_pretrained(tmp_path)
    saved = PreTrainedTokenizerFast.from_pretrained(tmp_path).chat_template
    assert saved == {**NAMED, "default": NAMED[name]}
    with pytest.raises(
        UserError, match="no file rag; use a .jinja file, auto, none, default, tool_"
    ):
        Encoder(tok, "rag")
    with pytest.raises(UserError, match="choose one of rag"):
        Encoder(chat_tokenizer({"rag": CHATML}))


# --- report --------------------------------------------------------------------------------------


def test_the_report_counts_by_row_what_a_hand_count_finds(tmp_path):
    path = tmp_path / "mixed.jsonl"
    found = [
        {"prompt": "p", "chosen": "a longer one", "rejected": "b"},
        {"prompt": "p", "chosen": "same", "rejected": "same"},
        {"prompt": "q", "chosen": 3, "rejected": "b"},
        {"prompt": "xa", "chosen": "b", "rejected": "cc"},  # merges at the seam
        {"prompt": "r", "chosen": "x</s>", "rejected": "yyy"},  # brings its own end
        {"prompt": "<s>r", "chosen": "x", "rejected": "yyyyyyyyyyyyyyyyyyyyyyyyyyyyyy"},
    ]
    path.write_text("\n".join([*map(json.dumps, found), "{not json"]))
    encoder = Encoder(tokenizer(), max_length=20)
    kept, report = reading.pairs(path, encoder, on_bad_record="skip")
    assert [pair.location.rsplit(":", 1)[1] for pair in kept] == ["1", "4", "5", "6"]
    assert report["dropped"] == {"identical": 1, "malformed": 2}
    assert report["notes"] == {"merged at the seam": 1, "truncated": 1}
    line = preference_data.describe("train", report)
    assert line.startswith("train: 7 rows in the format prompt, 4 used; tokens ")
    # with <s> and the end, before truncation: 13 and 2, 2 and 4, 2 and 4, 2 and 31
    assert report["mean_tokens"] == {"prompt": 2, "chosen": 4.8, "rejected": 10.2}
    assert "; chosen longer in 25.0 %; " in line
    assert "2 malformed" in line and "1 truncated" in line
    with pytest.raises(UserError, match=":3: chosen: .*; or use --on_bad_record skip"):
        reading.pairs(path, encoder)
    [warning] = preference_data.describe_all({"train": report}, {"val": kept})[1:]
    assert warning.startswith("warning: train: 1 of 4 rows are longer than --max_length; ")
    for count, lines in (
        (2, []),
        (3, ["warning: train: 3 of 4 rows have no reply that continues "]),
    ):
        report["notes"] = {"without all of the generation prompt": count}
        warnings = preference_data.describe_all({"train": report}, {"val": kept})[1:]
        assert [line[: len(lines[0])] for line in warnings] == lines
    report["notes"] = {}
    warnings = preference_data.describe_all({"train": report}, {"val": []})[1:]
    assert warnings == ["warning: 0 validation rows; use --val_data FILE, or more rows"]
    path.write_text("{not json")  # skipping it would leave no row
    with pytest.raises(UserError, match=r"mixed.jsonl:1:2: not JSON.*list of them;"):
        reading.pairs(path, encoder)
