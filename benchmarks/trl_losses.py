"""TRL's side of `benchmarks.trl_parity`: losses and gradients of its own trainers on given inputs."""

import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

GROUP, GROUPS = 4, 2
MAX_COMPLETION = 16
"""Dr. GRPO's constant."""
THRESHOLD = 500.0
"""Reward of a good rollout, for KTO."""


class Found(NamedTuple):
    """The loss of a batch and its gradient, all parameters in one."""

    loss: float
    gradient: Tensor


@dataclass(frozen=True)
class Inputs:
    """One batch: 2 groups of 4 answers. Weights of the policy and of the reference are folders."""

    policy: str
    reference: str
    prompts: list[list[int]]
    answers: list[list[int]]
    behaviour: list[list[float]]
    """Log-probabilities of the answers' tokens, near those of the policy."""
    current: list[list[float]]
    """The policy's own."""
    rewards: list[float]
    other_rewards: list[float]
    end: int


def logprobs_of(folder: str, prompts: list[list[int]], answers: list[list[int]]) -> list[list[float]]:
    """Log-probabilities of the answers' tokens, one sequence a forward, in float32."""
    module = module_of(folder)
    found: list[list[float]] = []
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            logits = module(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        found.append(torch.log_softmax(logits, -1).gather(1, torch.tensor(answer)[:, None])[:, 0].tolist())
    return found


def module_of(folder: str) -> Any:
    """A transformers module in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def tokenizer_of(folder: str) -> Any:
    """The model's."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def flat(module: Any) -> Tensor:
    """The gradient of all parameters; 0 where there is none."""
    named = sorted(module.named_parameters())
    return torch.cat([(torch.zeros_like(one) if one.grad is None else one.grad).flatten() for _, one in named])


def backed(module: Any, loss: Tensor) -> Found:
    """After the backward pass."""
    loss.backward()
    return Found(loss.item(), flat(module))


COMMON: dict[str, Any] = {
    "per_device_train_batch_size": GROUP * GROUPS,
    "max_steps": 1,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "logging_strategy": "no",
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
}


def trained_by(inputs: Inputs, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of all trainers: those of their configuration, and their own."""
    model = module_of(inputs.policy)
    return {**COMMON, "output_dir": tempfile.mkdtemp(), **options}, {
        "model": model,
        "processing_class": tokenizer_of(inputs.policy),
    }


def grpo(*, vllm: bool = False, **options: Any) -> Callable[[Inputs], Found]:
    """GRPOTrainer: its own scoring of given completions, then its loss.

    The behaviour log-probabilities are the old policy's; with `vllm` those of the sampling engine, which it corrects.
    """

    def theirs(inputs: Inputs) -> Found:
        import trl  # pyright: ignore[reportMissingImports] -- of .venv-bench
        from datasets import Dataset  # pyright: ignore[reportMissingImports]

        class Given(trl.GRPOTrainer):
            def _generate(self, prompts: list[Any]) -> Any:
                texts = self.processing_class.batch_decode(inputs.answers)
                return inputs.prompts, inputs.answers, None, texts, inputs.behaviour if vllm else None, {}, None, []

        arguments, rest = trained_by(inputs, {"num_generations": GROUP, "max_completion_length": MAX_COMPLETION})
        functions, weights = reward_functions(inputs, options.get("multi_objective_aggregation") is not None)
        data = Dataset.from_list([{"prompt": str(index)} for index in range(GROUP * GROUPS)])
        chosen = trl.GRPOConfig(**arguments, **{"beta": 0.0, **options}, reward_weights=weights)
        trainer: Any = Given(**rest, args=chosen, train_dataset=data, reward_funcs=functions)
        trainer.use_vllm = vllm
        if trainer.ref_model is not None:
            trainer.ref_model.load_state_dict(module_of(inputs.reference).state_dict())
        made = scored(trainer, inputs)
        if not vllm:
            known = torch.zeros(made["completion_ids"].shape)
            for index, values in enumerate(inputs.behaviour):
                known[index, : len(values)] = torch.tensor(values)
            made["old_per_token_logps"] = known
        return backed(trainer.model, trainer.compute_loss(trainer.model, made))

    return theirs


def reward_functions(inputs: Inputs, several: bool) -> tuple[list[Any], list[float]]:
    """Reward functions in the trainer's form, and their weights: 1 for one; for two, weights that bring their sum into
    the thousands.
    """

    def first(completions: Any, **_: Any) -> list[float]:
        return inputs.rewards

    def second(completions: Any, **_: Any) -> list[float]:
        return inputs.other_rewards

    return ([first, second], [1000.0, 2000.0]) if several else ([first], [1.0])


def scored(trainer: Any, inputs: Inputs) -> dict[str, Any]:
    """The trainer's own advantages, masks and log-probabilities of the given completions."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer._generate_and_score_completions([{"prompt": str(n)} for n in range(len(inputs.answers))])


def rloo(inputs: Inputs) -> Found:
    """RLOOTrainer, without its penalty."""
    import trl  # pyright: ignore[reportMissingImports]
    from datasets import Dataset  # pyright: ignore[reportMissingImports]

    class Given(trl.RLOOTrainer):
        def _generate(self, prompts: list[Any]) -> Any:
            return inputs.prompts, inputs.answers, self.processing_class.batch_decode(inputs.answers)

    arguments, rest = trained_by(inputs, {"num_generations": GROUP, "max_completion_length": MAX_COMPLETION})
    functions, _ = reward_functions(inputs, several=False)
    data = Dataset.from_list([{"prompt": str(index)} for index in range(GROUP * GROUPS)])
    chosen = trl.RLOOConfig(**arguments, beta=0.0)
    trainer: Any = Given(**rest, args=chosen, train_dataset=data, reward_funcs=functions)
    return backed(trainer.model, trainer.compute_loss(trainer.model, scored(trainer, inputs)))


def sequences(inputs: Inputs, indices: list[int]) -> dict[str, Tensor]:
    """Prompts and answers as tensors, padded on the right."""
    rows = [[*inputs.prompts[index], *inputs.answers[index]] for index in indices]
    longest = max(map(len, rows))
    starts = [len(inputs.prompts[index]) for index in indices]
    at = torch.arange(longest)[None]
    lengths = torch.tensor([len(row) for row in rows])[:, None]
    attention = (at < lengths).long()
    return {
        "input_ids": torch.tensor([row + [0] * (longest - len(row)) for row in rows]),
        "attention_mask": attention,
        "completion_mask": attention * (at >= torch.tensor(starts)[:, None]),
    }


def sft(inputs: Inputs) -> Found:
    """SFTTrainer, on completions alone."""
    import trl  # pyright: ignore[reportMissingImports]
    from datasets import Dataset  # pyright: ignore[reportMissingImports]

    arguments, rest = trained_by(inputs, {})
    data = Dataset.from_list([{"prompt": "a", "completion": "b"}] * 8)
    trainer: Any = trl.SFTTrainer(**rest, args=trl.SFTConfig(**arguments), train_dataset=data)
    trainer.model.train()
    batch = sequences(inputs, list(range(len(inputs.answers))))
    labels = batch["input_ids"].masked_fill(batch.pop("completion_mask") == 0, -100)
    return backed(trainer.model, trainer.compute_loss(trainer.model, {**batch, "labels": labels}))


def dpo(*, one_by_one: bool = False, **options: Any) -> Callable[[Inputs], Found]:
    """DPOTrainer; `one_by_one`: the mean of its losses of batches of one pair."""

    def theirs(inputs: Inputs) -> Found:
        import trl  # pyright: ignore[reportMissingImports]
        from datasets import Dataset  # pyright: ignore[reportMissingImports]

        arguments, rest = trained_by(inputs, options)
        data = Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}] * 8)
        reference = module_of(inputs.reference)
        trainer: Any = trl.DPOTrainer(**rest, ref_model=reference, args=trl.DPOConfig(**arguments), train_dataset=data)
        trainer.model.train()
        chosen = list(range(0, len(inputs.answers), 2))
        parts = [[one] for one in chosen] if one_by_one else [chosen]
        batches = [sequences(inputs, [*part, *(index + 1 for index in part)]) for part in parts]
        losses = [trainer.compute_loss(trainer.model, batch) for batch in batches]
        return backed(trainer.model, torch.stack(losses).mean())

    return theirs


def kto(**options: Any) -> Callable[[Inputs], Found]:
    """KTOTrainer. The answers that it estimates the KL divergence from are the rollouts themselves."""

    def theirs(inputs: Inputs) -> Found:
        import trl  # pyright: ignore[reportMissingImports]
        from datasets import Dataset  # pyright: ignore[reportMissingImports]

        arguments, rest = trained_by(inputs, options)
        data = Dataset.from_list([{"prompt": "a", "completion": "b", "label": bool(n % 2)} for n in range(8)])
        reference = module_of(inputs.reference)
        trainer: Any = trl.KTOTrainer(**rest, ref_model=reference, args=trl.KTOConfig(**arguments), train_dataset=data)
        trainer.model.train()
        batch: dict[str, Any] = sequences(inputs, list(range(len(inputs.answers))))
        batch |= {f"KL_{name}": value for name, value in batch.items()}
        batch["label"] = torch.tensor([reward >= THRESHOLD for reward in inputs.rewards])
        return backed(trainer.model, trainer.compute_loss(trainer.model, batch))

    return theirs


def iw_opd(inputs: Inputs) -> Found:
    """The loss of IWOPDTrainer without its weights by position; its other parts need a teacher's server or model."""
    from trl.experimental.iw_opd import IWOPDTrainer  # pyright: ignore[reportMissingImports]

    module, teacher = module_of(inputs.policy), logprobs_of(inputs.reference, inputs.prompts, inputs.answers)
    batch = sequences(inputs, list(range(len(inputs.answers))))
    mask, ids = batch.pop("completion_mask"), batch["input_ids"]
    known = torch.zeros(ids.shape)
    for index, values in enumerate(teacher):
        known[index][mask[index] == 1] = torch.tensor(values)
    own = SimpleNamespace(temperature=1.0, iw_opd_gamma=0.0, iw_opd_epsilon=1e-8, model=module)
    own._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    labels = ids.masked_fill(mask == 0, -100)[:, 1:]
    logits = module(**batch).logits[:, :-1]
    return backed(module, IWOPDTrainer._compute_iw_opd_loss(own, logits, ids[:, 1:], labels, known[:, 1:]))
