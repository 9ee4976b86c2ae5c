"""What a run computes once, kept in its folder with hashes: later starts of it read it again."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ddp_utils import UserError, distributed, files
from ddp_utils.runs import checkpoint

REFERENCE = "reference_logps.safetensors"


class Cache:
    """The part of Run that keeps files; manifest.json has the hash and fingerprint of each.

    A fingerprint is what a file's content depends on, as plain data; with another one it is made
    again.
    """

    def once(self, name, make):
        """Return make(), plain data, called on all ranks by the first start of this run."""
        file = f"{name}.json"

        def read():
            path = self.cached_file(file, {})
            return json.loads(path.read_text()) if path else None

        value = distributed.on_main(self.world, read)
        if value is None:
            value = make()
            self.write_json(file, value)
            self.add_cached_file(file, {})
        return value

    def reference_logps(self, fingerprint, data, score, other=""):
        """Return the reference's log-probs of each split, [pairs, 2], on all ranks.

        data: split -> pairs; score(pairs): their log-probs now, asked for once a run; other: a run
        folder whose log-probs are read instead. Raises UserError if those have another fingerprint.
        """
        data = {split: pairs for split, pairs in data.items() if pairs}
        path = distributed.on_main(self.world, lambda: self._known_logps(fingerprint, other))
        tables = {}
        if path and self.world.is_main:
            tables = load_file(path)
        for split, pairs in data.items():
            if path:
                table = tables.get(split, torch.zeros(len(pairs), 2))
                tables[split] = distributed.all_sum(table.to(self.world.device), self.world)
            else:
                tables[split] = score(pairs)
        if self.world.is_main:
            path = self.folder / REFERENCE
            save_file({split: table.cpu().contiguous() for split, table in tables.items()}, path)
            shutil.copymode(self.folder / "config.json", path)
            self.add_cached_file(REFERENCE, fingerprint)
        return tables

    def _known_logps(self, fingerprint, other) -> str:
        path = self.cached_file(REFERENCE, fingerprint)
        if path or not other:
            return str(path or "")
        folder = Path(other)
        try:
            entry = checkpoint.read_manifest(folder)["files"][REFERENCE]
        except (ValueError, KeyError) as error:
            raise UserError(
                f"--reference_logps: {other}: {error}; give another run folder"
            ) from error
        for name, value in fingerprint.items():
            if entry.get("fingerprint", {}).get(name) != value:
                raise UserError(f"--reference_logps: {other} has another {name}; leave it out")
        path = folder / REFERENCE
        if files.sha256(path) != entry["sha256"]:
            raise UserError(f"--reference_logps: {path} is damaged; leave it out")
        self.say(f"reference log-probs: those of {other}")
        return str(path)

    def cached_file(self, name, fingerprint):
        """Return the path of a file that an earlier start of this run has left whole, or None."""
        path = self.folder / name
        entry = self.cached_files.get(name)
        if entry is None or entry.get("fingerprint") != fingerprint:
            return None
        if path.is_file() and files.sha256(path) == entry["sha256"]:
            return path
        self.say(f"warning: {path} does not match its sha256: it is made again")
        return None

    def add_cached_file(self, name, fingerprint, digest=None):
        """Remember a file that has just been written, with its hash, for later starts."""
        if self.world.is_main:
            digest = digest or files.sha256(self.folder / name)
            self.cached_files[name] = {"sha256": digest, "fingerprint": fingerprint}
            checkpoint.write_manifest(self.folder, {"files": self.cached_files})

    def read_cached_files(self):
        """Read the manifest of the run folder, if there is one and it is whole."""
        try:
            self.cached_files = checkpoint.read_manifest(self.folder)["files"]
        except ValueError as error:
            if any(self.folder.glob("manifest.*")):  # else there is none yet
                self.say(f"warning: {self.folder}: {error}: what it names is made again")
