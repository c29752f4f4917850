"""What ships with the package: two small trained models (`gdn-bytes`, `kda-bytes`); see README.md in this folder."""

from pathlib import Path

MODELS = {"gdn": "gdn-bytes", "kda": "kda-bytes"}
"""Op -> folder of the embedded byte-level model that is built on it."""


def model_folder(op: str) -> Path:
    """Folder of the embedded model of `op` (`gdn` or `kda`), in the layout of transformers' `save_pretrained`."""
    return Path(__file__).parent / MODELS[op]
