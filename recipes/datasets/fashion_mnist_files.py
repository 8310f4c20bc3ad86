"""Names and checksums of the four Fashion-MNIST files, with functions to check and read them.

This module does not import torch.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from pathlib import Path

DEBIAN_FOLDER = "/usr/share/datasets/fashion-mnist"
"""Folder of Debian's package `dataset-fashion-mnist`."""

DATA_MODULE = "recipes.datasets.fashion_mnist.FashionMNISTDataModule"
"""Target in a configuration whose `data.root` must contain these files."""

# Checksums of the uncompressed content: the gzip headers of the authors' files and Debian's have different names and
# times.
SHA256 = {
    "train-images-idx3-ubyte.gz": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte.gz": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte.gz": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte.gz": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}


def check_files(root: str | Path, *, name: str = "root") -> None:
    """Raise if one of the four Fashion-MNIST files is missing from a folder.

    Args:
        root: Folder with the files.
        name: Name of the option that sets the folder, for the message.

    Raises:
        ValueError: A file is missing.
    """
    missing = []
    for file_name in SHA256:
        if not (Path(root) / file_name).is_file():
            missing.append(file_name)
    if missing:
        raise ValueError(
            f"`{name}` (={root}) does not contain all files of Fashion-MNIST. Missing files: "
            f"{', '.join(missing)}. Install Debian's package (`apt-get install "
            "dataset-fashion-mnist`), or copy the four files of "
            "github.com/zalandoresearch/fashion-mnist into a folder and set data.root=<folder>."
        )


def content_of(root: str | Path, file_name: str) -> bytes:
    """Read and decompress a Fashion-MNIST file, and verify its SHA-256 checksum.

    Raises:
        ValueError: The file is damaged, or differs from the published one.
    """
    path = Path(root) / file_name
    try:
        content = gzip.decompress(path.read_bytes())
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(_damaged(path, f"cannot be unpacked ({error})")) from None
    checksum = hashlib.sha256(content).hexdigest()
    if checksum != SHA256[file_name]:
        raise ValueError(
            _damaged(path, f"has the SHA-256 {checksum} instead of {SHA256[file_name]}")
        )
    return content


def _damaged(path: Path, problem: str) -> str:
    return (
        f"`root` (={path.parent}) must contain the published files of Fashion-MNIST, but "
        f"{path.name} {problem}. Install the package again (`apt-get install --reinstall "
        "dataset-fashion-mnist`), or copy the file again."
    )
