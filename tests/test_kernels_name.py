"""kernels/ shares its name with a Hugging Face distribution that transformers looks for."""

import os
import subprocess
import sys

from helpers import ROOT
from transformers.utils.import_utils import KERNELS_MIN_VERSION

LOAD_BOTH = """
import importlib.metadata, sys
installed = {d.version for d in importlib.metadata.distributions(name="kernels")}
assert sys.argv[1] in installed, f"the simulated distribution is not visible: {installed}"
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM
import kernels
from model import Transformer
assert kernels.__file__.startswith(sys.argv[2]), kernels.__file__
theirs = AutoModelForCausalLM.from_pretrained(sys.argv[3])
ours = Transformer.from_pretrained(sys.argv[3])
ids = torch.arange(3, 9)
cu_seqlens, index = torch.tensor([0, 6], dtype=torch.int32), torch.arange(5)
logprobs, _ = ours(ids, cu_seqlens, index, ids[1:])
expected = theirs(ids[None]).logits[0, :5].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)
"""


def test_installed_hugging_face_kernels_does_not_break_transformers(tmp_path, random_tiny_model):
    info = tmp_path / f"kernels-{KERNELS_MIN_VERSION}.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: kernels\nVersion: {KERNELS_MIN_VERSION}\n"
    (info / "METADATA").write_text(metadata)
    arguments = [KERNELS_MIN_VERSION, str(ROOT), str(random_tiny_model)]
    command = [sys.executable, "-c", LOAD_BOTH, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
