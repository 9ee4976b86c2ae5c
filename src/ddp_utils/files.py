"""Files that are written whole or not at all, and digests of their content."""

import array
import contextlib
import hashlib
import os
import re
import shutil
from pathlib import Path

from safetensors import SafetensorError


@contextlib.contextmanager
def writing(target, temporary, fresh=True):
    """What is written to `temporary` first leaves no litter; errors of the disk name the target.

    fresh: whatever is there already goes.
    """
    if fresh:
        shutil.rmtree(temporary, ignore_errors=True)
    # rmtree leaves a link, and what is written would go where it leads
    if temporary.is_symlink() or temporary.is_file():
        temporary.unlink()
    try:
        yield
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        number = getattr(error, "errno", None) or re.search(r"os error (\d+)|$", str(error))[1]
        if not number:
            raise
        raise OSError(int(number), os.strerror(int(number)), str(target)) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextlib.contextmanager
def replacing(file):
    """Give a path to write to; what is there at the end replaces `file`, whole or not at all.

    It is in a folder of its own, so that nothing is written where a planted link leads.
    """
    file = Path(file)
    temporary = file.with_name(f".tmp-{file.name}")
    with writing(file, temporary):
        temporary.mkdir(parents=True)
        yield temporary / file.name
        written = temporary / file.name
        written.chmod(written.stat().st_mode | temporary.stat().st_mode & 0o666)  # safetensors: 600
        fsync(written)
        os.replace(written, file)
        temporary.rmdir()


def write_text(file, text):
    """Write a file that readers never see half of, and that is on the disk afterwards."""
    with replacing(file) as temporary:
        temporary.write_text(text, encoding="utf-8")


def sha256(path) -> str:
    """Of a whole file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(2**22), b""):
            digest.update(block)
    return digest.hexdigest()


def digest_of_files(files, *more) -> str:
    """By name, size and content; of a large file 64 places, since to read all takes minutes."""
    digest = hashlib.sha256(repr(more).encode())
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with open(file, "rb") as content:
            for place in range(0, size, max(2**20, size // 64)):
                content.seek(place)
                digest.update(content.read(2**20))
    return digest.hexdigest()[:16]


def fsync(path):
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digest_of_rows(pairs) -> str:
    """By the tokens of all pairs; of rows in a file by the file."""
    if hasattr(pairs, "digest"):
        return pairs.digest
    digest = hashlib.sha256()
    for pair in pairs:
        ids = *pair[0], -1, *pair[1], -1, *pair[2], -2
        digest.update(array.array("q", ids))
    return digest.hexdigest()[:16]
