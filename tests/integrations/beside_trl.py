"""trl's trainers with "sparsering" and with shared prompts; test_beside_packages.py installs trl.

    pytest tests/integrations/beside_trl.py    # where trl is installed

Their losses and gradients are those of the same trainers with other attention and separate rows.
"""

import copy
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, SFTConfig, SFTTrainer

from sparsering.integrations import transformers as hf
from sparsering.integrations import trl

pytestmark = [
    # trl calls transformers by names that transformers 5.23 renames
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Padding-free training is enabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*attention implementation:UserWarning"),
]
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
    "eos_token_id": 1, "bos_token_id": None,
}  # fmt: skip
hf.register()


def model_of(family: str = "qwen", implementation: str = "sdpa") -> Any:
    torch.manual_seed(0)
    if family == "qwen":
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=False))
    else:
        types = ["sliding_attention", "full_attention"]
        config = Gemma3TextConfig(**SIZES, sliding_window=4, layer_types=types)
        model = Gemma3ForCausalLM(config)
    for x in model.parameters():
        x.data *= 4  # so that positions and neighbours matter
    model.set_attn_implementation(implementation)
    return model


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<end>", "<unk>", *(f"w{i}" for i in range(3, 64))]
    inner = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **names)


def reward(completions: list[str], **_: Any) -> list[float]:
    numbers = ([int(x[1:]) for x in text.split() if x[0] == "w"] for text in completions)
    return [sum(row) / 100 for row in numbers]


PROMPTS = ["w3 w4 w5 w6 w7 w8 w9", "w3 w4 w5 w20", "w30", "w3 w4 w5 w6 w7 w8 w9 w10"]
HOW = {
    "grpo": (GRPOTrainer, GRPOConfig),
    "rloo": (RLOOTrainer, RLOOConfig),
}


def trainer_of(folder: Any, kind: str, model: Any, peft_config: Any = None, **options: Any) -> Any:
    cls, config = HOW[kind]
    given = {
        "use_cpu": True, "bf16": False, "per_device_train_batch_size": 8, "num_generations": 4,
        "max_completion_length": 6, "report_to": [], "save_strategy": "no", "disable_tqdm": True,
        "logging_steps": 1, "max_steps": 2, "learning_rate": 1e-3, "seed": 3, "beta": 0.1,
    } | options  # fmt: skip
    data = Dataset.from_dict({"prompt": PROMPTS * 2})
    more = {} if peft_config is None else {"peft_config": peft_config}
    return cls(
        model,
        reward_funcs=reward,
        args=config(str(folder), **given),
        train_dataset=data,
        processing_class=tokenizer(),
        **more,
    )


def rows_of(trainer: Any) -> dict[str, Any]:
    """Generates answers and scores them, as the first step of a training does."""
    trainer.model.train()
    return trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))


def loss_and_gradients(trainer: Any, inputs: dict[str, Any]) -> list[Tensor]:
    """Computes a step's loss on given rows, as the trainer would; gradients by parameter."""
    trainer.model.zero_grad()
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1  # as `train` sets it
    loss = trainer.compute_loss(trainer.model_wrapped, inputs)
    loss.backward()
    gradients = [x.grad.clone() for x in trainer.model.parameters() if x.grad is not None]
    return [loss.detach(), *gradients]


def assert_near(found: list[Tensor], expected: list[Tensor], share: float = 3e-5) -> None:
    """Compares with the largest number of each tensor."""
    assert len(found) == len(expected) > 4
    for x, y in zip(found, expected, strict=True):
        assert float((x - y).abs().max()) <= share * float(y.abs().max()) + 1e-6
    assert max(float(y.abs().max()) for y in expected[1:]) > 1e-2


def computed_tokens(trainer: Any, inputs: dict[str, Any]) -> int:
    """Counts the tokens that the model embeds for a step's loss."""
    counts: list[int] = []
    hook = trainer.model.get_input_embeddings().register_forward_hook(
        lambda module, arguments, out: counts.append(arguments[0].numel())
    )
    trainer.compute_loss(trainer.model_wrapped, inputs)
    hook.remove()
    return sum(counts)


@pytest.mark.parametrize("family", ["qwen", "gemma"])
@pytest.mark.parametrize("kind", HOW)
def test_shared_prompts_have_the_losses_and_gradients_of_separate_rows(kind, family, tmp_path):
    trainer = trainer_of(tmp_path, kind, model_of(family), beta=0.0, temperature=0.8)
    inputs = rows_of(trainer)
    # Moves the old log-probabilities, so that some ratios are clipped, and masks one answer out.
    _, old, _ = method(trainer, inputs)
    inputs["completion_mask"][1] = 0
    shift = 0.4 * torch.randn(old.shape, generator=torch.Generator().manual_seed(0))
    if kind == "grpo":
        inputs["old_per_token_logps"] = old + shift
    else:
        inputs["old_logps"] = (old * inputs["completion_mask"]).sum(1) + shift[:, 0]
    expected, separate = loss_and_gradients(trainer, inputs), computed_tokens(trainer, inputs)
    own = method(trainer, inputs, compute_entropy=True, batch_size=3)
    assert trl.share_prompts(trainer) is trainer
    assert_near(loss_and_gradients(trainer, inputs), expected)
    prompts, answers = inputs["prompt_mask"].sum(1), inputs["completion_mask"].sum(1)
    assert separate == inputs["prompt_ids"].numel() + inputs["completion_ids"].numel()
    # At most the answers, each with a copy of its prompt's last token, and the two prompts.
    most = int(answers.sum()) + 8 + int(prompts.unique().sum())
    assert computed_tokens(trainer, inputs) <= most < separate
    ours = method(trainer, inputs, compute_entropy=True, batch_size=3)
    real = inputs["completion_mask"].bool()
    for x, y in zip(ours[:2], own[:2], strict=True):
        torch.testing.assert_close(x[real], y[real], rtol=0, atol=3e-5)
        assert not x[~real].any()
    assert ours[2] is None
    trl.share_prompts(trl.share_prompts(trainer), False)
    assert computed_tokens(trainer, inputs) == separate


def method(trainer: Any, inputs: dict[str, Any], **options: Any) -> Any:
    """Calls the method that is replaced, without gradients."""
    ids = torch.cat((inputs["prompt_ids"], inputs["completion_ids"]), 1)
    mask = torch.cat((inputs["prompt_mask"], inputs["completion_mask"]), 1)
    number = inputs["completion_ids"].shape[1]
    with torch.no_grad():
        found = getattr(trainer, trl.METHOD)(trainer.model, ids, mask, number, **options)
    return found if options else (None, found[0], None)


def history(trainer: Any) -> list[float]:
    trainer.train()
    kinds = ("loss", "grad_norm", "entropy", "kl", "reward")
    return [row[kind] for row in trainer.state.log_history for kind in kinds if kind in row]


@pytest.mark.parametrize(
    "options",
    [{"beta": 0.0}, {"beta": 0.0, "num_iterations": 2, "steps_per_generation": 2}],
    ids=["one step", "two iterations"],
)
def test_a_training_with_sparsering_or_shared_prompts_is_that_with_eager(options, tmp_path):
    """With checkpointing, which is trl's default."""
    found = {}
    for name in ("eager", "sparsering", "shared"):
        model = model_of("gemma", "sdpa" if name == "shared" else name)
        trainer = trainer_of(tmp_path, "grpo", model, max_steps=3, **options)
        found[name] = history(trl.share_prompts(trainer) if name == "shared" else trainer)
    assert len(found["eager"]) >= 10
    for name in ("sparsering", "shared"):
        assert found[name] == pytest.approx(found["eager"], rel=1e-3, abs=1e-5), name


def test_adapters_and_the_penalty_against_their_base(tmp_path):
    """The reference is the model without its adapters."""
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    found = {}
    for shared in (False, True):
        torch.manual_seed(1)
        trainer = trainer_of(tmp_path, "grpo", model_of("gemma"), copy.deepcopy(lora), beta=0.5)
        found[shared] = history(trl.share_prompts(trainer) if shared else trainer)
    assert len(found[True]) >= 10
    assert found[True] == pytest.approx(found[False], rel=1e-3, abs=1e-5)


def test_what_cannot_share_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"a GRPOTrainer or RLOOTrainer of trl, got Linear"):
        trl.share_prompts(torch.nn.Linear(2, 2))
    trainer = trl.share_prompts(trainer_of(tmp_path, "grpo", model_of(), beta=0.0))
    with pytest.raises(NotImplementedError, match=r"got pixel_values; share_prompts\(trainer, F"):
        method(trainer, rows_of(trainer), pixel_values=torch.zeros(1))
    trainer.aux_loss_enabled = True  # as of a model of experts
    with pytest.raises(NotImplementedError, match=r"load balancing .* set router_aux_loss_coef=0"):
        trl.share_prompts(trainer)


@pytest.mark.parametrize("family", ["qwen", "gemma"])
def test_packed_supervised_training_is_that_of_eager_and_of_documents_alone(family, tmp_path):
    """SFTTrainer packs documents without padding: position_ids restart, and there is no mask."""
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(3, 64, (n,), generator=generator).tolist() for n in (20, 9, 14, 5)]
    found = {}
    for name in ("eager", "sparsering"):
        args = SFTConfig(
            str(tmp_path), packing=True, max_length=24, per_device_train_batch_size=4, use_cpu=True,
            bf16=False, report_to=[], save_strategy="no", disable_tqdm=True, max_steps=1,
        )  # fmt: skip
        data = Dataset.from_dict({"input_ids": documents})
        trainer = SFTTrainer(
            model_of(family, name), args=args, train_dataset=data, processing_class=tokenizer()
        )
        inputs = next(iter(trainer.get_train_dataloader()))
        assert inputs["input_ids"].shape == (1, 48) and "attention_mask" not in inputs
        found[name] = loss_and_gradients(trainer, inputs)
    model = model_of(family, "eager")
    number = sum(len(row) - 1 for row in documents)
    rows = [torch.tensor([row]) for row in documents]
    loss = sum(model(x, labels=x).loss * (x.shape[1] - 1) for x in rows) / number
    loss.backward()
    alone = [loss.detach(), *(x.grad for x in model.parameters())]
    assert_near(found["eager"], alone)
    assert_near(found["sparsering"], alone)
