"""The official checkpoint of ProteinMPNN: {num_edges, noise_level, model_state_dict} in a .pt.

The same three in a .safetensors: the first two are its metadata.
"""

import io
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open

from ddp_utils import UserError, files, jsonl

OFFICIAL = "give a full-backbone ProteinMPNN checkpoint such as v_48_020.pt"


def read(path):
    """Tensors by name, (neighbours, noise level) of a file; UserError if it has no such thing."""
    file = jsonl.resolve(path)
    if not file.is_file():
        raise UserError(f"{path}: no such file; {OFFICIAL}")
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as content:
                tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
                about = content.metadata() or {}
        else:
            about = torch.load(file, map_location="cpu", weights_only=True)
            tensors = about["model_state_dict"]
        if not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
            raise ValueError("model_state_dict holds something else than tensors")
        neighbours, noise_level = int(about["num_edges"]), float(about.get("noise_level", 0))
        if neighbours < 1 or not 0 <= noise_level < torch.inf:
            raise ValueError(f"num_edges {neighbours}, noise_level {noise_level}")
        return tensors, (neighbours, noise_level)
    except KeyError as error:
        raise UserError(f"{path}: {error} is missing; {OFFICIAL}") from error
    # torch's own name for the error of a file that holds more than tensors and numbers
    except (
        *(torch.serialization.pickle.UnpicklingError, SafetensorError, OSError, EOFError),
        *(AttributeError, IndexError, RuntimeError, TypeError, ValueError),
    ) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:100]
        raise UserError(f"{path}: not a ProteinMPNN checkpoint: {reason}; {OFFICIAL}") from error


def sizes(path, tensors):
    """(width, encoder layers, decoder layers) of these tensors; UserError for CA-only models."""
    ca_only = tensors.keys() & {"W_v.weight", "features.node_embedding.weight"}
    if ca_only:
        raise UserError(f"{path}: {min(ca_only)}: a CA-only model; {OFFICIAL}")
    layers = [
        len({name.split(".")[1] for name in tensors if name.startswith(f"{kind}_layers.")})
        for kind in ("encoder", "decoder")
    ]
    return (*tensors.get("W_e.weight", torch.empty(0)).shape, 1)[0] or 1, *layers


def check(path, tensors, expected):
    """Raise UserError that names the first tensor which a model with `expected` cannot take."""
    # what is missing first: the width was taken from one of them
    for name in sorted(expected | tensors, key=lambda name: name in tensors):
        given = tensors.get(name)
        if name not in expected:
            problem = "is unknown"
        elif given is None:
            problem = "is missing"
        elif given.shape != expected[name].shape:
            problem = f"is {list(given.shape)}, expected {list(expected[name].shape)}"
        elif not given.is_floating_point() or not given.isfinite().all():
            problem = "does not hold finite numbers alone"
        else:
            continue
        raise UserError(f"{path}: tensor {jsonl.shown(name)} {problem}; {OFFICIAL}")


def write(path, tensors, neighbours, noise_level):
    """Write what the official code reads (.pt), or safetensors, all or nothing.

    Raises UserError for another ending, OSError if it cannot be written.
    """
    path = Path(path)
    about = {"num_edges": neighbours, "noise_level": noise_level}
    if path.suffix == ".safetensors":
        content = safetensors.torch.save(tensors, {key: str(about[key]) for key in about})
    elif path.suffix == ".pt":
        archive = io.BytesIO()
        torch.save({**about, "model_state_dict": tensors}, archive)
        content = archive.getvalue()
    else:
        raise UserError(f"{path}: its name must end in .pt or .safetensors")
    with files.replacing(path) as temporary:
        temporary.write_bytes(content)
