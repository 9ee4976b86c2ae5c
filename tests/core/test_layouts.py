"""Packed rows against each row alone; the self-tests of head and layout; replies.

P, C, R: numbers of prompt, chosen and rejected tokens of a pair; T of a packed row; H heads, K key
heads, D head size.
"""

import copy
import itertools
import re
from unittest import mock

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from test_logps import PAD, SIZES, build, by_hand, some_pairs
from torch._subclasses import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

from conftest import need
from ddp_utils import UserError, distributed
from lm import logps, models, sampling
from lm.chat_template import Encoder
from lm.fast import by_sequence, memory_efficient, self_test, shared_prefix

PLAIN = SIZES | PAD | dict(max_position_embeddings=64)
WIDE = PLAIN | dict(intermediate_size=64, num_key_value_heads=2)
SHORT = PLAIN | dict(intermediate_size=64)
OLD = PAD | dict(n_layer=2, n_head=4, vocab_size=97)
EIGHT = WIDE | dict(head_dim=8)
WINDOW = dict(sliding_window=6)  # the longest row of PAIRS has 25 tokens
LAST = WINDOW | dict(use_sliding_window=True, max_window_layers=1)  # in the last layer only
MIXED = WINDOW | dict(layer_types=["sliding_attention", "full_attention"])
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
LATENT = dict(q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8)
DEEPSEEK = WIDE | LATENT | EXPERTS | dict(num_key_value_heads=4, n_routed_experts=4)
DEEPSEEK |= dict(n_group=1, topk_group=1, first_k_dense_replace=1)
STATES = dict(num_heads=4, head_dim=16, n_groups=2, state_size=8, chunk_size=8)
STATES |= dict(hidden_size=32, num_hidden_layers=2, vocab_size=97)
CONVOLUTION = ["conv", "full_attention"]
SHARED = dict(shared_expert_intermediate_size=32)
OSS = dict(num_local_experts=4, num_experts_per_tok=2, rope_parameters=None)
NO_CAP = dict(attn_logit_softcapping=None)
SCALED = dict(attention_multiplier=0.3, residual_multiplier=0.5, embedding_multiplier=2.0)

MIXTRAL = dict(num_local_experts=4, num_experts_per_tok=2, router_jitter_noise=0.1)
OLD_STATES = SIZES | PAD | dict(state_size=8, time_step_rank=4)
RWKV = SIZES | PAD | dict(attention_hidden_size=32, context_length=64)
GRIFFIN = dict(lru_width=32, attention_window_size=6, block_types=["recurrent", "attention"])
JAMBA = dict(attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, mamba_d_state=8)
JAMBA |= dict(num_experts=4, mamba_dt_rank=4, use_mamba_kernels=False)
GEMMA_4 = MIXED | dict(hidden_size_per_layer_input=8, vocab_size_per_layer_input=97)
BLOOM = SIZES | PAD | dict(n_layer=2, n_head=4)
# images: text and vision parts, and the tokens that stand for an image
VISION = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
VISION |= dict(image_size=28, patch_size=14)
IMAGE = dict(image_token_index=93)
GEMMA_VISION = dict(text_config=EIGHT | MIXED, vision_config=VISION | dict(vision_use_head=False))
GEMMA_VISION |= IMAGE | dict(mm_tokens_per_image=4, boi_token_index=91, eoi_token_index=92)
LLAVA = dict(text_config=transformers.LlamaConfig(**WIDE), vision_config=VISION)
ROPE = dict(rope_type="default", mrope_section=[1, 1, 2], rope_theta=1e4)
QWEN_VISION = dict(depth=2, hidden_size=32, intermediate_size=64, num_heads=2, out_hidden_size=32)
QWEN_VISION |= dict(deepstack_visual_indexes=[0, 1])
QWEN_VL = dict(text_config=EIGHT | dict(rope_parameters=ROPE), vision_config=QWEN_VISION)
QWEN_VL |= dict(image_token_id=93, video_token_id=94)
QWEN_VL |= dict(vision_start_token_id=91, vision_end_token_id=92)

SHARES = ""
SEEN = r"log-probs of a token differ by \S+ nats"  # by comparing, as nothing was raised
ELSEWHERE = r"of \d layers use the attention of packed rows"
RAISED = r"(?:soft-cap, sinks or dropout|do not pass on which tokens)"  # by packing.attend
IMAGES = "gemma-3 with images"
MODELS = {  # what the line must contain that says why the prompt is not shared
    "llama": (transformers.LlamaConfig(**WIDE), SHARES),
    "qwen2": (transformers.Qwen2Config(**WIDE), SHARES),
    "qwen2, window": (transformers.Qwen2Config(**WIDE, **LAST), SHARES),
    "qwen3": (transformers.Qwen3Config(**EIGHT), SHARES),
    "qwen3-moe": (transformers.Qwen3MoeConfig(**EIGHT, **EXPERTS), SHARES),
    "phi-3": (transformers.Phi3Config(**WIDE), SHARES),
    "phi-3, window": (transformers.Phi3Config(**WIDE, **WINDOW), SHARES),
    "olmo-2": (transformers.Olmo2Config(**WIDE), SHARES),
    "gpt2": (transformers.GPT2Config(**OLD, n_embd=32, n_positions=64), SHARES),
    "gpt-neox": (transformers.GPTNeoXConfig(**SHORT), SHARES),
    "opt": (transformers.OPTConfig(**PLAIN, ffn_dim=64, word_embed_proj_dim=32), SHARES),
    "granite": (transformers.GraniteConfig(**WIDE, **SCALED, logits_scaling=8.0), SHARES),
    "mistral": (transformers.MistralConfig(**WIDE, sliding_window=None), SHARES),
    "mistral, window": (transformers.MistralConfig(**WIDE, **WINDOW), SHARES),
    "gemma-3": (transformers.Gemma3TextConfig(**EIGHT, **MIXED), SHARES),
    "gemma-2, no cap": (transformers.Gemma2Config(**EIGHT, **MIXED, **NO_CAP), SHARES),
    "phi": (transformers.PhiConfig(**SHORT), SHARES),
    "cohere": (transformers.CohereConfig(**WIDE, logit_scale=0.25), SHARES),
    "smollm3": (transformers.SmolLM3Config(**WIDE), SHARES),
    "glm-4": (transformers.Glm4Config(**EIGHT), SHARES),
    "starcoder-2, window": (transformers.Starcoder2Config(**WIDE, **WINDOW), SHARES),
    "deepseek-3": (transformers.DeepseekV3Config(**DEEPSEEK), SHARES),
    "falcon": (transformers.FalconConfig(**PLAIN, alibi=False), ELSEWHERE),
    "mamba-2": (transformers.Mamba2Config(**PAD, **STATES), ELSEWHERE),
    "lfm-2, convolution": (transformers.Lfm2Config(**WIDE, layer_types=CONVOLUTION), ELSEWHERE),
    "mixtral": (transformers.MixtralConfig(**WIDE, **MIXTRAL), SHARES),
    "granite-moe": (transformers.GraniteMoeConfig(**WIDE, **MIXTRAL), SHARES),
    "gemma-4": (transformers.Gemma4TextConfig(**EIGHT, **GEMMA_4), SHARES),
    IMAGES: (transformers.Gemma3Config(**GEMMA_VISION), SHARES),
    "llava": (transformers.LlavaConfig(**LLAVA, **IMAGE), SHARES),
    "qwen3-vl": (transformers.Qwen3VLConfig(**QWEN_VL), SHARES),
    "mamba": (transformers.MambaConfig(**OLD_STATES), ELSEWHERE),
    "falcon-mamba": (transformers.FalconMambaConfig(**OLD_STATES), ELSEWHERE),
    "rwkv": (transformers.RwkvConfig(**RWKV), ELSEWHERE),
    "recurrent-gemma": (transformers.RecurrentGemmaConfig(**WIDE, **GRIFFIN), ELSEWHERE),
    "jamba": (transformers.JambaConfig(**WIDE, **JAMBA), ELSEWHERE),
    "bloom": (transformers.BloomConfig(**BLOOM), ELSEWHERE),
    # a window that is in transformers' mask only
    "qwen2-moe, window": (transformers.Qwen2MoeConfig(**WIDE, **LAST, **EXPERTS, **SHARED), SEEN),
    # asked for what the kernels cannot do; stablelm's layers drop the packing
    "gemma-2": (transformers.Gemma2Config(**EIGHT, **MIXED), RAISED),
    "gpt-oss": (transformers.GptOssConfig(**EIGHT, **WINDOW, **OSS), RAISED),
    "stablelm": (transformers.StableLmConfig(**WIDE), RAISED),
}
OWN_HEAD = {"recurrent-gemma"}  # soft-caps its logits under another name than Gemma 2 does


# with responses that are not fed at all, since their only token is a target
PAIRS = some_pairs((7, 5, 9), (1, 1, 4), (11, 8, 6), (4, 6, 1), (9, 12, 17), (1, 1, 1))


def checked(model, pairs=PAIRS):
    """Return a scorer, and what the self-tests of head and layout print, "" if they pass."""
    scorer = logps.Scorer(model)
    lines = self_test.choose_head_and_layout(scorer, pairs, "auto", distributed.World())
    [head] = [line for line in lines if line.startswith("the head")] or [""]
    [layout] = [line for line in lines if line.startswith("the prompt")] or [""]
    assert len(lines) == bool(head) + bool(layout) and scorer.shared == (not layout)
    return scorer, head, layout


@torch.no_grad()
def assert_as_alone(scorer, config, factor, pairs=PAIRS):
    """All pairs' log-probs in this scorer's layout are those of full logits of each row alone."""
    found = torch.stack(scorer(scorer.collate(pairs, "cpu")), -1)  # [B, 2]
    model = build(config, factor).double()
    expected = torch.stack([by_hand(model, pair) for pair in pairs])
    torch.testing.assert_close(found.double(), expected.double(), rtol=5e-5, atol=2e-4)


def test_a_saved_model_of_every_architecture_is_its_base_again(tmp_path):
    """Read as fp32 and without dropout, it is saved in bf16 and with the settings of its files."""
    encoder = Encoder(models.load_tokenizer("data/demo/model"))
    for name, (config, _) in MODELS.items():
        base, result = tmp_path / name / "base", tmp_path / name / "result"
        config = copy.deepcopy(config)
        for key in {"attention_dropout", "resid_pdrop", "dropout"} & vars(config).keys():
            setattr(config, key, 0.1)
        build(config, 1.0).bfloat16().save_pretrained(base)
        model = models.load(base, torch.float32, torch.device("cpu"))
        models.save(model, models.load(base, "auto", models.META), encoder, result)
        before, after = (type(model).from_pretrained(path) for path in (base, result))
        for key, tensor in before.state_dict().items():
            assert after.state_dict()[key].dtype == tensor.dtype, (name, key)
            assert torch.equal(after.state_dict()[key], tensor), (name, key)
        same = {"_name_or_path": "", "eos_token_id": 2}  # the end token of the template is added
        assert after.config.to_dict() | same == before.config.to_dict() | same, name


@pytest.mark.parametrize("factor", [3.0, 20.0])
@pytest.mark.parametrize("name", MODELS)
def test_log_probs_equal_those_of_each_row_alone(name, factor):
    """In whatever layout the self-tests chose; which one it is, and why, stands in the table."""
    if name == IMAGES:
        need("transformers", "5.8", IMAGES)
    config, why_not = MODELS[name]
    scorer, head, layout = checked(build(config, factor))
    assert bool(head) == (name in OWN_HEAD), head
    line = why_not and rf"the prompt cannot be shared \(.*{why_not}.*\): separate rows"
    assert re.fullmatch(line, layout)
    assert_as_alone(scorer, config, factor)
    if factor == 3.0:  # a fresh model, which is wrong only when it has learnt something
        _, head, layout = checked(build(config, 0.02))
        assert (bool(head), bool(layout)) == (name in OWN_HEAD, bool(why_not))


def test_a_window_in_the_mask_only_is_seen_where_the_longest_row_is_not_the_longest_pair():
    """Rows of 29 and 42 tokens, pairs of 57 and 46: a window of 30 shows in the latter only."""
    config = copy.deepcopy(MODELS["qwen2-moe, window"][0])
    config.sliding_window = 30
    pairs = some_pairs((2, 2, 2), (20, 8, 9), (2, 40, 2))
    scorer, *_ = checked(build(config, 20.0), pairs)
    assert_as_alone(scorer, config, 20.0, pairs)


LONG = dict(rope_type="longrope", short_factor=[1.0] * 4, long_factor=[2.0] * 4, rope_theta=1e4)
LONG |= dict(original_max_position_embeddings=12)
DYNAMIC = dict(rope_type="dynamic", rope_theta=1e4, factor=4.0)
STRETCHED = [  # beyond 12 tokens, the angles depend on the longest row of the batch
    transformers.Phi3Config(**WIDE, original_max_position_embeddings=12, rope_parameters=LONG),
    transformers.LlamaConfig(**WIDE | dict(max_position_embeddings=12), rope_parameters=DYNAMIC),
]


def test_rows_whose_angles_would_hang_on_the_others_in_the_batch_are_refused():
    for config in STRETCHED:
        model = build(config, 10.0)
        models.check_fit(model, None, some_pairs((8, 4, 3)))  # 12 tokens
        with pytest.raises(UserError, match="13 tokens, the model has 12 positions"):
            models.check_fit(model, None, some_pairs((9, 3, 4)))


def test_a_model_that_does_not_name_its_backbone_is_scored_by_its_own_logits():
    """Llama-4's base_model is the whole model: it returns logits, no hidden states."""
    sizes = dict(intermediate_size_mlp=64, num_local_experts=2, attention_chunk_size=8)
    config = transformers.Llama4TextConfig(**EIGHT, **sizes, no_rope_layers=[1, 0])
    chosen, rejected = logps.Scorer(build(config, 3.0))(logps.collate(PAIRS))  # the trial of DDP
    assert chosen.shape == rejected.shape == (len(PAIRS),)
    scorer, head, layout = checked(build(config, 3.0))
    assert "using the model's full logits" in head
    # rows of more than 8,191 tokens, all pairs of a batch together, would be scaled otherwise
    assert "cannot be shared (attention is scaled by the place in a row" in layout
    assert_as_alone(scorer, config, 3.0)


def visible(spans, window, chosen=False, others=False):
    """Return which tokens of a packed row see which, [T, T], written token by token.

    Faults: chosen: rejected sees chosen; others: a pair sees the pairs before it.
    """
    tokens = []
    for pair, (p, c, r) in enumerate(spans):
        tokens += [(pair, "p", place) for place in range(p)]
        tokens += [(pair, "c", p + place) for place in range(c)]
        tokens += [(pair, "r", p + place) for place in range(r)]
    table = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
    for here, there in itertools.product(range(len(tokens)), repeat=2):
        (pair, part, place), (other, other_part, other_place) = tokens[here], tokens[there]
        in_pair = pair == other or others
        in_response = chosen or (part, other_part) != ("r", "c")
        in_window = window is None or place - other_place < window
        table[here, there] = there <= here and in_pair and in_response and in_window
    return table


def dense(has_window=True, **faults):
    """Return the attention of a packed row in one piece, in place of shared_prefix._by_pair."""

    def kernel(tensors, packing, scale, window):
        mask = visible(packing.spans, window if has_window else None, **faults)
        is_grouped = tensors[0].shape[1] != tensors[1].shape[1]
        output = scaled_dot_product_attention(
            *tensors, attn_mask=mask, scale=scale, enable_gqa=is_grouped
        )
        return output.transpose(1, 2)

    return kernel


PACK = logps._pack


def positions_behind_chosen(pairs):
    """Pack pairs, with positions of rejected tokens that follow chosen, not the prompt."""
    ids, starts, _, spans = PACK(pairs)
    position_ids = []
    for span in spans:
        position_ids += range(sum(span))
    return ids, starts, [position_ids], spans


CONTROLS = {"llama": 1.0, "gpt2": 0.02, "mistral, window": 1.0}


@pytest.mark.parametrize("name", CONTROLS)
def test_the_self_test_detects_a_fault_in_attention_or_positions(name, monkeypatch):
    """This includes weights so small that log-probs hardly change.

    Positions have no effect where queries and keys are nearly 0: there, weights are larger.
    """
    faults = [dense(chosen=True), dense(others=True)] + [dense(False)] * ("window" in name)
    cases = [(shared_prefix, "_by_pair", *case) for case in itertools.product(faults, (0.02, 3.0))]
    cases += [(logps, "_pack", positions_behind_chosen, scale) for scale in (CONTROLS[name], 3.0)]
    for module, function, fault, factor in cases:
        with monkeypatch.context() as patch:
            patch.setattr(module, function, fault)
            _, _, line = checked(build(MODELS[name][0], factor))
        assert re.search(SEEN, line), (function, factor)


NO_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
]


@pytest.mark.parametrize("error", NO_MEMORY)
def test_out_of_memory_is_no_reason_for_a_layout_or_a_cache_that_needs_more(error, monkeypatch):
    """It is a RuntimeError, as what a model does not support is."""
    model = build(MODELS["llama"][0])
    scorer = logps.Scorer(model)
    full = mock.Mock(side_effect=error)
    monkeypatch.setattr(self_test, "_find_difference", full)
    with pytest.raises(RuntimeError, match=re.escape(str(error))):
        self_test.check_layout(scorer, PAIRS, torch.device("cpu"))
    monkeypatch.setattr(sampling, "_difference", full)
    with pytest.raises(RuntimeError, match=re.escape(str(error))):
        sampling.choose_way(scorer, [[5, 6]], 4, distributed.World())
    norm = next(module for name, module in model.named_modules() if name.endswith("norm"))
    monkeypatch.setattr(type(norm.requires_grad_(False)), "forward", full)
    with pytest.raises(RuntimeError, match=re.escape(str(error))):
        memory_efficient.apply(model)


def gradients(scorer, shared):
    """Return name -> gradient of a sum in which every response has its own weight."""
    scorer.set_layout(shared)
    scorer.zero_grad()
    sums = torch.stack(scorer(scorer.collate(PAIRS, "cpu")))  # [2, B]
    (sums * torch.linspace(-1, 2, sums.numel()).view_as(sums)).sum().backward()
    return {name: p.grad.clone() for name, p in scorer.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("use_lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "mistral, window"])
@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_gradients_equal_those_of_separate_rows(name, use_lora, checkpointing):
    """Complaint 06: of rows whose activations are all kept; of each parameter."""
    model = build(MODELS[name][0], 3.0)
    if use_lora:
        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
        for key, parameter in model.named_parameters():
            if "lora_B" in key:  # B = 0 would hide what reaches A
                parameter.data.normal_()
    scorer = logps.Scorer(model.train())
    expected = gradients(scorer, shared=False)
    if checkpointing:
        models.checkpoint_activations(model)
    with mock.patch.object(shared_prefix, "_by_pair", wraps=shared_prefix._by_pair) as kernel:
        packed = gradients(scorer, shared=True)
    assert kernel.call_count == 2 * (1 + checkpointing)  # a layer attends again in the backward
    total = torch.cat([gradient.flatten() for gradient in expected.values()]).norm()
    for key, gradient in expected.items():
        assert gradient.any(), key
        # plus: the gradient of a key's bias is 0 up to rounding
        assert (packed[key] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-7 * total, key


@pytest.mark.parametrize("name", ["granite", "cohere", "gemma-2"])
def test_gradients_of_scaled_or_capped_logits_equal_those_of_the_model_itself(name):
    scorer = logps.Scorer(build(MODELS[name][0], 20.0))
    found = gradients(scorer, shared=False)
    scorer.full_logits = True
    for key, gradient in gradients(scorer, shared=False).items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-4, atol=1e-5, msg=key)


def varlen_by_hand(query, key, value, query_bounds, key_bounds, max_q, max_k, **options):
    """torch.nn.attention.varlen as documented: [T, H, D] and [T, K, D], a loop over sequences."""
    look_back, look_ahead = options["window_size"]
    assert look_ahead == 0
    assert options.get("enable_gqa", not by_sequence.GROUPED)  # torch 2.11 has no such argument
    assert query_bounds.dtype == key_bounds.dtype == torch.int32
    query_sizes, key_sizes = query_bounds.diff().tolist(), key_bounds.diff().tolist()
    assert (max_q, max_k) == (max(query_sizes), max(key_sizes))
    group = query.shape[1] // key.shape[1]
    keys, values = (t.repeat_interleave(group, 1).split(key_sizes) for t in (key, value))
    outputs = []
    for q, k, v in zip(query.split(query_sizes), keys, values, strict=True):
        scores = torch.einsum("qhd,khd->hqk", q, k) * (options["scale"] or q.shape[-1] ** -0.5)
        back = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
        is_visible = (back >= 0) & ((look_back < 0) | (back <= look_back))
        weights = scores.where(is_visible, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(outputs)


SPANS = [
    [(5, 3, 4)],
    [(5, 3, 4), (1, 2, 6), (7, 8, 5)],
    [(4, 3, 0), (2, 1, 0), (3, 2, 5)],  # of one token: rejected
    [(4, 0, 3), (2, 1, 2), (1, 0, 2)],  # chosen
    [(1, 0, 0), (3, 0, 0)],  # both
]


def test_one_call_for_all_sequences_equals_two_calls_a_pair(monkeypatch):
    """Both equal attention in one piece, and so do their gradients; some heads share keys."""
    monkeypatch.setattr(by_sequence, "varlen_attn", varlen_by_hand)
    for spans, window in itertools.product(SPANS, (None, 1, 3, 50)):
        for heads, scale in ((2, None), (4, 0.7)):
            compare_kernels(spans, window, heads, scale)


def compare_kernels(spans, window, heads, scale):
    generator = torch.Generator().manual_seed(3)
    tokens = sum(map(sum, spans))
    tensors = []
    for count in (heads, 2, 2):
        tensors.append(torch.randn(1, count, tokens, 8, generator=generator).requires_grad_())
    slope = torch.randn(1, tokens, heads, 8, generator=generator)
    outcomes = []
    for kernel in (dense(), by_sequence.attend_by_sequence, shared_prefix._by_pair):
        packing = shared_prefix.Packing(spans, torch.device("cpu"))
        output = kernel(tensors, packing, scale, window)
        outcomes.append([output, *torch.autograd.grad(output, tensors, slope)])
    for outcome in outcomes[1:]:
        torch.testing.assert_close(outcome, outcomes[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("capability", "arguments", "width", "kernel"),
    [
        ((9, 0), {"scale", "window_size"}, 8, "attend_by_sequence"),
        ((8, 0), {"scale", "window_size"}, 256, "attend_by_sequence"),
        ((9, 0), {"scale", "window_size"}, 512, "_by_pair"),  # Gemma 4
        ((7, 5), {"scale", "window_size"}, 8, "_by_pair"),  # flash attention needs Ampere
        ((9, 0), {"is_causal"}, 8, "_by_pair"),  # torch 2.10
    ],
)
def test_a_gpu_without_the_kernel_attends_by_pair(
    capability, arguments, width, kernel, monkeypatch
):
    """Its prompt is shared all the same. The tensors are on a GPU that does not exist."""
    used = []
    for module, name in ((by_sequence, "attend_by_sequence"), (shared_prefix, "_by_pair")):

        def record(tensors, *_, name=name):
            used.append(name)
            return tensors[0]

        monkeypatch.setattr(module, name, record)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(by_sequence, "OPTIONS", arguments)
    by_sequence.is_supported.cache_clear()
    with FakeTensorMode():
        tensor = torch.empty(1, 2, 5, width, dtype=torch.float16, device="cuda")
        packing = shared_prefix.Packing([(2, 1, 2)], tensor.device)
        shared_prefix.attend(None, tensor, tensor, tensor, None, packing=packing)
    by_sequence.is_supported.cache_clear()
    assert used == [kernel]


@pytest.mark.parametrize("ranks", [1, 3])
def test_packed_rows_contain_no_token_twice_and_no_padding(ranks):
    """They have P + C + R tokens per pair, summed over all ranks and micro-batches."""
    scorer = logps.Scorer(build(MODELS["llama"][0], 1.0))
    totals = {True: 0, False: 0}
    for shared, rank in itertools.product(totals, range(ranks)):
        scorer.set_layout(shared)
        world = distributed.World(rank=rank, world_size=ranks)
        for part in scorer.micro_batches(range(len(PAIRS)), PAIRS, world, 2):
            totals[shared] += scorer.collate([PAIRS[row] for row in part.index], "cpu").ids.numel()
    minimum = sum(len(p.prompt) + len(p.chosen) - 1 + len(p.rejected) - 1 for p in PAIRS)
    assert totals[True] == minimum < totals[False]


def greedy(scorer, prompts, ends=()):
    """Return the 12 most probable tokens after each prompt."""
    spec = sampling.SampleSpec(0.0, 1.0, max_new_tokens=12, batch_size=99, seed=0)
    return sampling.generate(scorer, prompts, [*ends], distributed.World(), spec)


@torch.no_grad()
def plain_greedy(model, prompt):
    """Return the same from plain forwards of one prompt: no cache, no padding."""
    ids = [*prompt]
    for _ in range(12):
        ids.append(model(torch.tensor([ids])).logits[0, -1].argmax().item())
    return ids[len(prompt) :]


@pytest.mark.parametrize("shared", [False, True], ids=["separate", "shared"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral, window"])
@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_generation_does_not_depend_on_the_layout_and_restores_it(name, shared):
    """The most probable tokens are those of the model before any layout was chosen."""
    model = build(MODELS[name][0], 3.0)
    expected = plain_greedy(build(MODELS[name][0], 3.0), PAIRS[2].prompt)
    scorer = logps.Scorer(get_peft_model(model, LoraConfig(r=4, target_modules="all-linear")))
    scorer.set_layout(shared)  # B = 0: the same model
    before = scorer(scorer.collate(PAIRS, "cpu"))[0]
    assert greedy(scorer, [PAIRS[2].prompt]) == [expected] and len(expected) == 12
    assert scorer.shared == shared and scorer.training
    attention = scorer.unwrap().config._attn_implementation
    assert (attention == shared_prefix.NAME) == shared
    assert torch.equal(scorer(scorer.collate(PAIRS, "cpu"))[0], before)


def test_weights_that_rwkv_halves_for_replies_are_whole_again():
    model = build(transformers.RwkvConfig(**RWKV, rescale_every=1), 3.0).train()
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    greedy(logps.Scorer(model), [PAIRS[0].prompt])
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, weights[name]), name


@pytest.mark.parametrize("name", MODELS)
def test_replies_are_those_of_the_plain_forward_whatever_the_cache(name):
    """Padded on the left, two replies a prompt, of which some leave the batch before others."""
    if name == IMAGES:
        need("transformers", "5.8", IMAGES)
    model = build(MODELS[name][0], 3.0)
    pairs = PAIRS[:4]
    if name == "recurrent-gemma":  # transformers adds a prompt of one token to the text before
        pairs = [pair for pair in pairs if len(pair.prompt) > 1]
    prompts = [pair.prompt for pair in pairs] * 2
    expected = [plain_greedy(model, pair.prompt) for pair in pairs] * 2
    assert greedy(logps.Scorer(model), prompts) == expected
    end = expected[1][5]
    cut = [reply[: (reply + [end]).index(end)] for reply in expected]
    assert greedy(logps.Scorer(model), prompts, [end]) == cut
    assert len({*map(len, cut)}) > 1 or name != "llama"
