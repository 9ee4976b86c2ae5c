"""Replies of all kinds of models against the plain forward: one prompt, no cache, no padding."""

import pytest
import torch
import transformers
from test_logps import PAD, SIZES, build

import main_distributed
from conftest import need
from ddp_utils import UserError, distributed
from lm import logps, models, sampling
from lm.chat_template import Encoder
from lm.models import load_tokenizer

NO_HEADS = {name: size for name, size in SIZES.items() if name != "num_attention_heads"} | PAD
STATES = NO_HEADS | dict(state_size=8)
PLAIN = SIZES | PAD | dict(intermediate_size=64, max_position_embeddings=64)
BASE = PLAIN | dict(num_key_value_heads=2)
TINY = BASE | dict(max_position_embeddings=8)
EIGHT = BASE | dict(head_dim=8)
OLD = PAD | dict(n_layer=2, n_head=4, n_embd=32, vocab_size=97, n_positions=64)
MAMBA = dict(mamba_d_state=8, mamba_d_conv=4, mamba_expand=2)
HEADS = MAMBA | dict(mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=1, mamba_chunk_size=8)
FOUR = BASE | dict(num_hidden_layers=4, num_key_value_heads=4)
FOUR |= dict(layers_block_type=["mamba", "hybrid"] * 2)
HYBRID = dict(layer_types=["linear_attention", "full_attention"])
LINEAR = HYBRID | dict(linear_num_value_heads=4, linear_num_key_heads=2)
LINEAR |= dict(linear_key_head_dim=8, linear_value_head_dim=8)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
WINDOW = dict(sliding_window=6)  # the longest prompt has 21 tokens
MIXED = WINDOW | dict(layer_types=["sliding_attention", "full_attention"])
GRIFFIN = dict(num_hidden_layers=3, block_types=["recurrent", "recurrent", "attention"])
GRIFFIN |= dict(lru_width=32, attention_window_size=8)
DYNAMIC = dict(rope_type="dynamic", factor=4.0, rope_theta=1e4, original_max_position_embeddings=8)
ALIBI = dict(vocab_size=97, **PAD)

BATCHED, SINGLY, PLAINLY = sampling.WAYS
MODELS = {
    "mamba": (transformers.MambaConfig(**STATES), BATCHED),
    "falcon-mamba": (transformers.FalconMambaConfig(**STATES), BATCHED),
    "rwkv": (transformers.RwkvConfig(**NO_HEADS, attention_hidden_size=32), SINGLY),
    "xlstm": (transformers.xLSTMConfig(**NO_HEADS, num_heads=4, chunk_size=8), PLAINLY),
    "recurrent-gemma": (transformers.RecurrentGemmaConfig(**EIGHT | GRIFFIN), SINGLY),
    "jamba": (
        transformers.JambaConfig(
            **BASE, **MAMBA, use_mamba_kernels=False, attn_layer_period=2, attn_layer_offset=1
        ),
        BATCHED,
    ),
    "bamba": (transformers.BambaConfig(**BASE, **HEADS, attn_layer_indices=[1]), BATCHED),
    "zamba": (
        transformers.ZambaConfig(
            **FOUR, **MAMBA, attention_head_dim=16, n_mamba_heads=2, use_mamba_kernels=False
        ),
        BATCHED,
    ),
    "falcon-h1": (transformers.FalconH1Config(**EIGHT, **HEADS, mamba_d_ssm=64), BATCHED),
    "granite-4": (
        transformers.GraniteMoeHybridConfig(**BASE, **HEADS, layer_types=["mamba", "attention"]),
        BATCHED,
    ),
    "qwen3-next": (transformers.Qwen3NextConfig(**EIGHT, **LINEAR, **EXPERTS), BATCHED),
    "qwen3.5": (transformers.Qwen3_5TextConfig(**EIGHT, **LINEAR), BATCHED),
    "minimax": (transformers.MiniMaxConfig(**EIGHT, **HYBRID, block_size=4), SINGLY),
    "gemma-2": (transformers.Gemma2Config(**EIGHT, **MIXED), BATCHED),
    "cohere-2": (transformers.Cohere2Config(**BASE, **MIXED), BATCHED),
    "llama-4": (transformers.Llama4TextConfig(**EIGHT, attention_chunk_size=8), BATCHED),
    "gpt-2": (transformers.GPT2Config(**OLD), BATCHED),
    "ctrl": (transformers.CTRLConfig(**OLD, dff=64), BATCHED),
    "bloom": (transformers.BloomConfig(**ALIBI, hidden_size=32, n_layer=2, n_head=4), BATCHED),
    "mpt": (transformers.MptConfig(**ALIBI, d_model=32, n_heads=4, n_layers=2), BATCHED),
    "falcon, alibi": (transformers.FalconConfig(**SIZES, **PAD, alibi=True), BATCHED),
    # the angles of a row depend on the longest row of its batch
    "llama, dynamic": (transformers.LlamaConfig(**TINY, rope_parameters=DYNAMIC), SINGLY),
    "bart": (
        transformers.BartConfig(
            **PAD,
            vocab_size=97,
            d_model=32,
            decoder_layers=2,
            decoder_attention_heads=4,
            decoder_ffn_dim=64,
            is_decoder=True,
            is_encoder_decoder=False,
        ),
        SINGLY,
    ),
}
PROMPTS = [torch.arange(3 + n, 3 + 2 * n).tolist() for n in (21, 21, 9, 4)]
SPEC = sampling.SampleSpec(0.0, 1.0, max_new_tokens=8, batch_size=3, seed=0)


def replies(scorer, prompts=PROMPTS):
    return sampling.generate(scorer, prompts, [], distributed.World(), SPEC)


@torch.no_grad()
def plain_replies(model, prompts=PROMPTS):
    """Return the most probable tokens, each from a new forward of everything before it."""
    model.eval()
    texts = [list(prompt) for prompt in prompts]
    for text in texts:
        for _ in range(SPEC.max_new_tokens):
            logits = model(torch.tensor([text]), use_cache=False).logits
            text.append(logits[0, -1].argmax().item())
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


@pytest.mark.parametrize("name", MODELS)
def test_replies_equal_the_plain_forward_and_a_slower_way_is_a_warning(name, capsys):
    if name == "llama, dynamic":
        need("transformers", "5.17", "replies with dynamic RoPE")
    config, way = MODELS[name]
    expected = plain_replies(build(config))
    scorer = logps.Scorer(build(config))
    assert replies(scorer) == expected
    assert scorer.way == way
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == (way != BATCHED)
    assert all(line.startswith(f"warning: replies: {way.effect} (") for line in lines)


def test_a_model_that_generates_other_tokens_in_any_way_is_an_error():
    """RoBERTa numbers positions from 2 on; transformers generates with positions from 0 on."""
    config = transformers.RobertaConfig(**PLAIN, is_decoder=True)
    with pytest.raises(UserError, match=r"cannot generate replies here \(logits differ by \S+ of"):
        replies(logps.Scorer(build(config)))


def test_two_equally_probable_tokens_are_no_difference():
    """Every second token has the logit of the one before it, and all are rounded to bf16."""
    model = build(transformers.LlamaConfig(**BASE)).bfloat16()
    head = model.lm_head.weight.data
    head[1::2] = head[:-1:2]
    scorer = logps.Scorer(model)
    replies(scorer)
    assert scorer.way == BATCHED


def test_settings_of_the_model_do_not_change_its_distribution():
    model = build(transformers.LlamaConfig(**BASE))
    expected = plain_replies(model)
    settings = dict(repetition_penalty=9.0, suppress_tokens=expected[0], num_beams=3)
    own = transformers.GenerationConfig(**settings, cache_implementation="static")
    model.generation_config = own
    model.config.repetition_penalty = 9.0  # where old checkpoints have it
    assert replies(logps.Scorer(model)) == expected
    assert model.generation_config is own


def test_a_temperature_near_0_is_greedy():
    scorer = logps.Scorer(build(transformers.LlamaConfig(**BASE)))
    spec = SPEC._replace(temperature=1e-40)
    assert sampling.generate(scorer, PROMPTS, [], distributed.World(), spec) == replies(scorer)


@pytest.mark.parametrize("name", ["gpt-2", "mpt", "opt"])
def test_more_tokens_than_the_model_has_positions_are_an_error(name):
    """The limit is that of the plain forward."""
    opt = transformers.OPTConfig(**PLAIN, ffn_dim=64, word_embed_proj_dim=32)
    mpt = transformers.MptConfig(**ALIBI, d_model=32, n_heads=4, n_layers=2, max_seq_len=64)
    model = build({"mpt": mpt, "opt": opt, "gpt-2": MODELS["gpt-2"][0]}[name])
    fitting, longer = (logps.Pair([5] * 60, [5] * count, [5], "row 1", "") for count in (4, 5))
    model(torch.tensor([[5] * 64]))
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.tensor([[5] * 65]))
    models.check_fit(model, None, [fitting])
    with pytest.raises(UserError, match="row 1: 65 tokens, the model has 64 positions"):
        models.check_fit(model, None, [longer])


def test_a_reply_ends_at_the_tokens_of_template_tokenizer_and_model():
    encoder = Encoder(load_tokenizer("data/demo/model"))
    scorer = logps.Scorer(build(transformers.LlamaConfig(**BASE)))
    for own in (None, 5, [5, encoder.end]):
        scorer.model.generation_config.eos_token_id = own
        assert sampling.ends_of(scorer, encoder) == encoder.ends + [5] * (own is not None)


def test_replies_that_exceed_the_positions_are_an_error_before_a_model_is_loaded(tmp_path):
    flags = ["--check", "--max_rows", "8", "--max_new_tokens", "510", "--result_dir", str(tmp_path)]
    with pytest.raises(UserError, match=r"has 512 positions; use a smaller --max_new_tokens"):
        main_distributed.main(flags)
    assert main_distributed.main([*flags, "--num_samples", "0"]) == 0
