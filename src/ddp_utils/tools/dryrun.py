"""What a step needs, in bytes: it is run on tensors without contents, and those alive are counted.

They are torch's fake tensors: on the meta device, but taken for a CPU's, so that autocast,
attention and checkpointing go their usual ways. What a GPU does otherwise is done as there.
Nothing is read but the model's config, and nothing is computed.
"""

import copy
import logging
import types
import weakref
from typing import NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface

from ddp_utils import UserError, fast, logps, models, optim
from ddp_utils.fast import memory_efficient, shared_prefix
from ddp_utils.sharding import fsdp

GPU = torch.device("xpu")  # stands for one with bf16: of this kind no hardware is asked
ON_GPU = "shared_prompt_on_gpu"  # among transformers' attention implementations

# --- one step ------------------------------------------------------------------------------------


class Live(TorchDispatchMode):
    """Counts the bytes of all storages that operations make, as long as each is alive."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.sizes = {}

    def __torch_dispatch__(self, operation, _types, args=(), kwargs=None):
        found = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return found

    def _count(self, storage):
        key = id(storage)
        if key not in self.sizes:  # else it is a view, or was changed in place
            self.sizes[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key):
        self.now -= self.sizes.pop(key)

    def since(self):
        """The most since this was last asked."""
        peak, self.peak = self.peak, self.now
        return peak


class Need(NamedTuple):
    """What a process needs that shards nothing. From `forward` on: the most in each phase of a
    step, on top of weights, gradients and moments.
    """

    weights: float  # the trained ones in fp32, the frozen ones as they are loaded
    gradients: float
    table: float  # of the weights: a frozen embedding on a CPU, of which few rows leave their file
    moments: float  # of AdamW
    width: float  # of a number in the dtype that computes
    layers: float  # weights in this dtype: of all layers, ...
    layer: float  # ... of the largest one, ...
    root: float  # ... of all else: embedding, head, last norm
    layer_gradients: float
    root_gradients: float
    copies: float  # of the layers' trained matrices, by autocast
    kept: float  # for the backward
    forward: float  # up to the head
    head: float  # log-probs and loss, forward and backward
    backward: float  # of the layers
    bottom: float  # of the embedding
    step: float  # of the optimizer

    def towards(self, other, share):
        """On the line through two of them: `self` at 0, `other` at 1."""
        return Need(*(a + (b - a) * share for a, b in zip(self, other, strict=True)))


def need(config, outline, rows, row_losses, device="cpu") -> Need:
    """What a step on a micro-batch of these rows needs.

    outline: lora.outline(config); row_losses(scorer, batch, reference [B, 2]) -> losses [B], ...
    Where all layers are alike two and three are tried, and each further one adds the same.
    Raises UserError for a model that cannot compute without contents.
    """
    logging.getLogger("torch._subclasses.fake_tensor").disabled = True  # a line is enough
    count = outline.config.get_text_config().num_hidden_layers
    models = [_cut(outline, count, layers) for layers in (count, 2, 3)]
    size, size2, size3 = (sum(p.numel() for p in model.parameters()) for model in models)
    alike = count > 4 and size == size2 + (count - 2) * (size3 - size2)

    def tried(model):
        for shared in {"auto": (True, False), "shared": (True,)}.get(config.layout, (False,)):
            try:
                return _need(config, model, rows, row_losses, device, shared)
            except fast.REFUSALS as error:  # as in a run: who cannot share repeats the prompt
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{config.model_name}: no step without contents: {reason:.200}")

    if not alike:
        return tried(outline)
    two, three = map(tried, models[1:])
    return two.towards(three, count - 2)


def _cut(model, count, layers):
    """A copy with its first layers only."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            del module[layers:]
    return model


def _need(config, outline, rows, row_losses, device, shared):
    on_gpu, phases, chunk = device != "cpu", {}, dict(logps.CHUNK)
    frozen, autocast = optim.precision(config, GPU if on_gpu else torch.device("cpu"))
    model = _policy(config, outline)
    with FakeTensorMode(allow_non_fake_inputs=True), Live() as live:
        _on_paper(model, frozen)
        weights = live.now
        scorer = logps.Scorer(model, autocast)
        layers = fsdp.layers_of(scorer.bare(), fsdp.Settings())[0]
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, fused=device == "cuda", foreach=device == "xpu")
        for parameter in trained:  # as in DDP, where gradients are views of its buckets
            parameter.grad = torch.empty_like(parameter)
        gradients = live.now - weights
        optimizer.step()
        held = live.now
        phases["step"] = live.since() - held

        def mark(phase):
            phases[phase] = live.since() - held

        def backbone_done(_module, _inputs, output):
            mark("forward")
            output[0].register_hook(lambda _gradient: mark("head"))

        def embedding_done(_module, _inputs, output):
            if output.requires_grad:
                output.register_hook(lambda _gradient: mark("backward"))

        backbone, head = scorer.parts()
        scorer.own_head = backbone is scorer.bare() or head is None
        scorer.set_layout(shared)
        if on_gpu:
            logps.CHUNK["cpu"] = logps.WIDE_CHUNK
            if shared and scorer.precision.itemsize == 2:
                scorer.bare().set_attn_implementation(ON_GPU)
        backbone.register_forward_hook(backbone_done)
        scorer.bare().get_input_embeddings().register_forward_hook(embedding_done)
        batch = scorer.collate(rows, torch.device("cpu"))
        live.since()
        try:
            loss = row_losses(scorer, batch, torch.zeros(len(rows), 2))[0].sum()
            if shared and batch.layout["packing"].calls != len(layers):
                raise TypeError("its attention cannot be steered")
            kept = live.now - held
            loss.backward()
        finally:
            logps.CHUNK.update(chunk)
        mark("bottom" if "backward" in phases else "backward")
    layers = [list(layer.parameters()) for layer in layers]
    inside = {p for layer in layers for p in layer}
    root = [p for p in model.parameters() if p not in inside]
    matrices = [p for p in inside if p.requires_grad and p.ndim > 1]

    def computes(parameters):
        return sum(p.numel() * (autocast or p.dtype).itemsize for p in parameters)

    def learns(parameters):
        return sum(4 * p.numel() for p in parameters if p.requires_grad)

    table = scorer.bare().get_input_embeddings().weight
    mapped = not (on_gpu or table.requires_grad or head is None or table is head.weight)
    mapped = mapped and outline.config.dtype == table.dtype  # else it is converted
    sizes = weights, gradients, mapped * table.nbytes, held - weights - gradients
    sizes += scorer.precision.itemsize, computes(inside), max(map(computes, layers)), computes(root)
    sizes += max(map(learns, layers)), learns(root), computes(matrices) if autocast else 0, kept
    order = ("forward", "head", "backward", "bottom", "step")
    return Need(*sizes, *(phases.get(phase, 0) for phase in order))


def _policy(config, outline):
    """The outline as lora.load_policy() and lean.apply() would have the model."""
    model = models.no_dropout(copy.deepcopy(outline))
    if config.use_gradient_checkpointing:
        models.checkpoint_activations(model)
    if config.fine_tuning == "lora":
        model = models.add_adapter(model, config)
    if config.lean:  # which tries modules on numbers: here on those of a smaller model
        small = _small(model)
        memory_efficient.apply(small)
        for module, twin in zip(model.modules(), small.modules(), strict=True):
            if "forward" in vars(twin):
                module.forward = types.MethodType(memory_efficient._forward, module)
    return model.train()


def _small(model):
    """A copy with random weights, at most 8 in each direction."""
    model, made = copy.deepcopy(model), {}
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is not None and old not in made:
                new = torch.randn([min(8, size) for size in old.shape], generator=generator)
                made[old] = nn.Parameter(new, old.requires_grad)
            module._parameters[name] = made.get(old)
    return model


def _on_paper(model, frozen):
    """Put fake tensors in place of meta ones: trained weights in fp32, others in `frozen`."""
    made = {None: None}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, old in table.items():
                if old not in made:
                    is_weight = isinstance(old, nn.Parameter)
                    own = torch.float32 if old.requires_grad else frozen
                    dtype = own if is_weight else old.dtype  # whatever the files have
                    new = torch.empty(old.shape, dtype=dtype)
                    made[old] = nn.Parameter(new, old.requires_grad) if is_weight else new
                table[name] = made[old]


def _attend_on_gpu(
    _module, query, key, value, _mask, scaling=None, packing=None, softcap=None, s_aux=None,
    sliding_window=None, **_unused,
):  # fmt: skip
    """packing.attend() as it is on CUDA in half precision."""
    if packing is None or softcap is not None or s_aux is not None:
        raise NotImplementedError("not with this kernel")
    packing.calls += 1
    half = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype
    query, key, value = (tensor.to(half) for tensor in (query, key, value))
    with torch.autocast("cpu", enabled=False):
        return _by_sequence(query, key, value, packing, scaling, sliding_window), None


_by_sequence = shared_prefix._by_sequence  # the argument above hides the module
AttentionInterface.register(ON_GPU, _attend_on_gpu)
