"""`register` runs before a model's file is imported, as in `hf.load`: what we replace still fits.

Each test starts a fresh process, because a file imported earlier keeps transformers' own functions.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import masking_utils
from transformers_families import NOT_BUILT, families

from sparsering.integrations import transformers as hf

IMAGES = ("gemma3", "gemma4", "gemma4_unified")  # their masks join a mask of images
TEXTS = ("llama", "mistral", "gemma2", "llama4_text")
# of these inputs, or in float64; without `register` too
NOT_RUN_BY_EAGER = {
    *("blt", "hrm_text", "inkling2_text", "musicgen", "musicgen_melody", "recurrent_gemma"),
    *("xglm", "xlstm"),
}
SCRIPT = """
import json, logging, sys, warnings
sys.modules["peft"] = None  # not installed: it would import files of models itself
from sparsering.integrations import transformers as hf
hf.register()
imported = [name for name in sys.modules if name.startswith("transformers.models.")]
assert not [name for name in imported if ".modeling_" in name and ".auto." not in name]
logging.disable(logging.WARNING)
warnings.simplefilter("ignore")
import registered_first
print(json.dumps({name: registered_first.compared(name) for name in sys.argv[1:]}))
"""


def results(*names: str) -> dict[str, str]:
    """Compares "sparsering" with eager attention in a process that registers first."""
    paths = os.pathsep.join([*sys.path, str(Path(__file__).parent)])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *names],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_images_and_texts_of_models_that_are_imported_after_register():
    found = results(*(f"{name} with images" for name in IMAGES), *TEXTS)
    assert found == dict.fromkeys(found, "equal")


@pytest.mark.slow
def test_every_family_that_is_imported_after_register():
    found = results(*(name for name in families() if name not in NOT_BUILT))
    unlike = {name: text for name, text in found.items() if text != "equal"}
    by_name = "sparsering: NotImplementedError"
    others = {name: text for name, text in unlike.items() if not text.startswith(by_name)}
    assert others.keys() == NOT_RUN_BY_EAGER, others
    assert all(text.startswith("eager: ") for text in others.values()), others
    assert len(found) - len(unlike) > 100


def test_replaced_functions_keep_their_signatures():
    hf.register()
    ids = torch.zeros(1, 4, 8)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'colour'"):
        masking_utils._preprocess_mask_arguments(colour="red")
    with pytest.raises(TypeError, match=r"takes from 6 to 7 positional arguments but 8 were given"):
        masking_utils._preprocess_mask_arguments(*[None] * 8)
    with pytest.raises(TypeError, match=r"multiple values for argument 'config'"):
        masking_utils._preprocess_mask_arguments(None, ids, config=None)
    assert masking_utils._preprocess_mask_arguments.__name__ == "_preprocess_mask_arguments"
