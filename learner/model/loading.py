"""A base model as a job's settings hold it: in 16 or 4 bits, with adapters, checkpointed, compiled. Trains nothing."""

import copy
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import safetensors
import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from rollstream.eventlog.disk_space import is_outage
from rollstream.learner.model import tree_attention
from rollstream.learner.model.tree_attention import attention_as
from rollstream.schemas.devices import MODEL_LOADING, device_of
from rollstream.schemas.errors import ModelError, is_out_of_memory
from rollstream.schemas.settings import NF4, LoraSettings, ModelSettings
from rollstream.schemas.variables import one_line

logger = logging.getLogger(__name__)

SHARED_BASES: "WeakValueDictionary[tuple[Any, ...], torch.nn.Module]" = WeakValueDictionary()
"""Base models below the adapters of this process's policies, by the settings that decide their parameters; gone with
the last of those policies.
"""

OF_MODELS = (OSError, ValueError, ImportError, KeyError, RuntimeError, safetensors.SafetensorError)
"""Exceptions of transformers for a model that it cannot load."""
POSITIONS = re.compile(r"(^|\.)(wpe|position_embeddings?|embed_positions|embed_pos)(\.base_layer)?$")
"""Names of the modules that embed positions: inside an adapter if it targets them."""
ALL_LINEAR = "all-linear"
BY_LONGEST_ROW = ("dynamic", "longrope")
"""Kinds of rotary embeddings for which transformers takes frequencies by the longest row of a forward pass."""


def compute_dtype_of(settings: ModelSettings, device: torch.device) -> torch.dtype:
    """The type that forwards compute in."""
    if settings.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if settings.dtype == "bfloat16" else torch.float32


def load_module(
    settings: ModelSettings,
    path: str,
    device: torch.device,
    *,
    seed: int,
    shares_base: bool = False,
    is_trained: bool = True,
) -> Any:
    """A transformers model on a device, in peft's wrapper if it has adapters, which begin as `seed` says.

    `path`: a folder or a hub name. Parameters are float32 unless they are below an adapter or not `is_trained`; these
    have the type that forwards compute in. `shares_base`: those below an adapter may be those of other policies, so
    nobody may change them. Raises ModelError naming what cannot be loaded, OSError in an outage of disk or network.
    """
    with MODEL_LOADING:
        if shares_base and can_share(settings, device):
            module = _shared_base(settings, path, device)
        else:
            dtype = _held_dtype(settings, device) if is_trained else compute_dtype_of(settings, device)
            module = _load_base(settings, path, device, dtype)
        for part in module.modules() if settings.quantization else ():
            # Else bitsandbytes repacks weights where there is AVX512-BF16, in forwards without gradients, and rounds
            # more.
            part.support_avx512bf16_for_cpu = False
        if settings.lora:
            torch.manual_seed(seed)
            module = _with_adapters(module, settings)
        return module.to(device)


def empty_module(settings: ModelSettings, path: str, device: torch.device, *, seed: int) -> Any:
    """Build the module that `load_module` makes on this device, with all parameters and buffers on the meta device.

    `seed`: without effect, as adapters have no values. Raises ModelError.
    """
    folder = Path(path).expanduser()
    attention = settings.attn_implementation
    with _named_failures(path), MODEL_LOADING, torch.device("meta"):
        config = AutoConfig.from_pretrained(str(folder) if folder.is_dir() else path, trust_remote_code=False)
        module = AutoModelForCausalLM.from_config(
            config,
            dtype=_held_dtype(settings, device),
            **({} if attention == "auto" else {"attn_implementation": attention}),
        )
        return _with_adapters(module, settings) if settings.lora else module


def can_share(settings: ModelSettings, device: torch.device) -> bool:
    """Whether adapters may share their base model with those of other policies, without a change of any bit."""
    return not why_apart(settings, device)


def why_apart(settings: ModelSettings, device: torch.device) -> str:
    """The reason why a policy has a base model of its own; empty if it may share one."""
    if settings.lora is None:
        return "its full weights are trained"
    if settings.quantization is not None:
        return "the state of 4-bit weights is in their modules"
    if settings.lora.use_dora and device.type != "cpu":
        return "magnitudes of DoRA are computed on the CPU, before the base model is moved"
    return ""


def described_bases(models: Mapping[str, ModelSettings], num_ranks: int = 1) -> str:
    """Description of the model groups that share one base model in memory and those that have their own, with reasons.
    `models`: settings by group, of one learner with `num_ranks` processes. A group whose device does not exist is left
    out.
    """
    sharing: dict[tuple[Any, ...], list[str]] = {}
    apart: dict[str, str] = {}
    for group, settings in sorted(models.items()):
        try:
            device = torch.device(device_of(settings.device, torch.cuda.device_count(), group))
        except ModelError:
            continue
        why = "each process has its shards" if num_ranks > 1 else why_apart(settings, device)
        if why:
            apart[group] = why
        else:
            sharing.setdefault(_kind(settings, settings.path, device), []).append(group)
    for groups in sharing.values():
        if len(groups) == 1:
            apart[groups[0]] = "no other group has its path, dtype, device and attention"
    shared = [f"{', '.join(groups)} share {kind[0]}" for kind, groups in sharing.items() if len(groups) > 1]
    return "; ".join([*shared, *(f"{group} has its own: {why}" for group, why in sorted(apart.items()))])


def _kind(settings: ModelSettings, where: str, device: torch.device) -> tuple[Any, ...]:
    """Key of all settings that determine the parameters of a base model loaded from `where`."""
    return where, compute_dtype_of(settings, device), str(device), settings.attn_implementation


def _shared_base(settings: ModelSettings, path: str, device: torch.device) -> Any:
    """A base model with modules and buffers of its own, and the parameters of all that were loaded from equal files."""
    folder = Path(path).expanduser()
    stats = {one.name: one.stat() for one in folder.iterdir()} if folder.is_dir() else {}
    files = tuple(sorted((name, one.st_size, one.st_mtime_ns) for name, one in stats.items()))
    where = str(folder.resolve()) if folder.is_dir() else path
    key = (*_kind(settings, where, device), files)
    base = SHARED_BASES.get(key)
    if base is None:
        base = SHARED_BASES[key] = _load_base(settings, path, device, _held_dtype(settings, device)).to(device)
    module = copy.deepcopy(base, {id(one): one for one in base.parameters()})
    vars(module)["shared_base"] = base  # held, and none of the module's own modules
    return module


def frozen_copy(module: Any, dtype: torch.dtype) -> Any:
    """A copy of a module for evaluation, without gradients; its parameters are in this type from the beginning."""
    made = {
        id(one): torch.nn.Parameter(one.detach().to(dtype), requires_grad=False)
        for one in module.parameters()
        if one.dtype != dtype and one.is_floating_point()
    }
    return copy.deepcopy(module, made).eval().requires_grad_(requires_grad=False)


def hold_parameters_in(module: Any, dtype: torch.dtype) -> None:
    """Give all parameters this type. Buffers keep theirs: frequencies of rotary embeddings that are rounded to bfloat16
    turn tokens at later positions by other angles.
    """
    kept = [(part, dict(part._buffers)) for part in module.modules()]
    module.to(dtype)
    for part, buffers in kept:
        part._buffers.update(buffers)


def inner(module: Any) -> Any:
    """The transformers model, which adapters are injected into."""
    return module.get_base_model() if hasattr(module, "get_base_model") else module


@torch.no_grad()
def has_plain_head(module: Any) -> bool:
    """Whether logits are a linear map of the last hidden states: no cap or scale on them, no adapter on the head.

    Also False where transformers names the whole model as its own decoder, as for Llama 4.
    """
    model = inner(module)
    head = model.get_output_embeddings()
    if type(head) is not torch.nn.Linear:
        return False
    ids = torch.tensor([[0, 1]], device=head.weight.device)
    module.eval()
    hidden = getattr(model.get_decoder()(input_ids=ids, use_cache=False), "last_hidden_state", None)
    return hidden is not None and torch.equal(head(hidden), module(input_ids=ids, use_cache=False).logits)


def warn_of_head(settings: ModelSettings, compute_dtype: torch.dtype, *, is_plain: bool) -> None:
    """Log if `fp32_head` is set for a head that is not computed apart from the model, so that it has no effect."""
    if settings.fp32_head and compute_dtype != torch.float32 and not is_plain:
        logger.warning(
            "model=%s caps, scales or adapts its logits, so fp32_head has no effect: it is for those that are a linear "
            "map of the last hidden states; leave model.fp32_head out, or set model.dtype to float32",
            settings.path,
        )


def num_positions(module: Any) -> int | None:
    """The most tokens that a row can have, None for any: positions are looked up in a table, as GPT-2's are, or rotated
    otherwise in all rows of a forward pass if one of them is longer, as by Phi-3's longrope.
    """
    found: list[int] = []
    decoder = inner(module).get_decoder()
    for name, part in decoder.named_modules():
        if isinstance(part, torch.nn.Embedding) and POSITIONS.search(name):
            padding = 0 if part.padding_idx is None else part.padding_idx + 1
            found.append(len(part.weight) - int(getattr(part, "offset", padding)))
    found += [len(table) for name, table in decoder.named_buffers() if name.endswith(".embed_positions")]
    found += _rotary_limits(decoder.config)
    return min(found, default=None)


def _rotary_limits(config: Any) -> Iterator[int]:
    """Lengths up to which embeddings of a kind in `BY_LONGEST_ROW` are the same whatever other rows there are."""
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    for one in (parameters, *(layers for layers in parameters.values() if isinstance(layers, dict))):
        if one.get("rope_type") in BY_LONGEST_ROW:
            yield int(one.get("original_max_position_embeddings") or config.max_position_embeddings)


def has_dropout(module: Any) -> bool:
    """Whether forwards differ between training and evaluation."""
    config = inner(module).get_decoder().config
    named = (value for name, value in vars(config).items() if "drop" in name)
    return any(isinstance(value, float) and value > 0 for value in named) or any(
        isinstance(part, torch.nn.Dropout) and part.p > 0 for part in module.modules()
    )


def enable_checkpointing(model: Any, path: str) -> None:
    """Let a transformers model (without adapters around it) compute activations again in the backward pass.

    Raises ModelError if it cannot, or has dropout outside of modules, which would then be on in every loss.
    """
    config = model.get_decoder().config
    dropout = {name: value for name, value in vars(config).items() if "drop" in name and isinstance(value, float)}
    if odd := next((name for name, value in dropout.items() if value > 0), None):
        raise ModelError(
            f"model {path}: gradient_checkpointing does not go with its {odd} of {dropout[odd]:g}; "
            f"set {odd} to 0 in its config.json, or leave gradient_checkpointing off"
        )

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Contexts of the forward pass, and of the second one within the backward pass, when the first has ended."""
        return nullcontext(), attention_as(config, config._attn_implementation)

    try:
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
    except ValueError as error:
        raise ModelError(f"model {path}: {error} Leave gradient_checkpointing off.") from error


def compile_layers(model: Any, path: str, *, has_weights: bool = True) -> None:
    """Compile each layer of a transformers model, for any number of rows and tokens; attention over a tree is not.

    Raises ModelError if it has no layers that are known as such, or if there is nothing here to compile them with,
    which shows in a forward pass: not without weights, where another process of this job has them and looks.
    """
    from torch._dynamo.exc import TorchDynamoException

    decoder = model.get_decoder()
    layers = [layer for layer in decoder.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not layers:
        raise ModelError(f"model {path}: none of its layers can be compiled; leave model.compile off")
    AttentionInterface.register(tree_attention.NAME, torch.compiler.disable(tree_attention.attend))
    for layer in layers:
        layer.compile(dynamic=True)
    if not has_weights:
        return
    ids = torch.zeros((1, 2), dtype=torch.int64, device=model.get_input_embeddings().weight.device)
    try:
        decoder(input_ids=ids, use_cache=False)
    except TorchDynamoException as error:
        raise ModelError(f"model {path} cannot be compiled here: {one_line(error)}; leave model.compile off") from error


def _load_base(settings: ModelSettings, path: str, device: torch.device, dtype: torch.dtype) -> Any:
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    folder = Path(path).expanduser()
    if looks_local and not folder.is_dir():
        raise ModelError(f"model folder {path} does not exist; give a transformers folder or a hub name")
    attention = settings.attn_implementation
    with _named_failures(path):
        return AutoModelForCausalLM.from_pretrained(
            str(folder) if folder.is_dir() else path,
            dtype=dtype,
            trust_remote_code=False,
            attn_implementation=None if attention == "auto" else attention,
            **({} if settings.quantization is None else _in_4_bits(settings, dtype, device)),
        )


def _held_dtype(settings: ModelSettings, device: torch.device) -> torch.dtype:
    """Data type of the base model's parameters."""
    return compute_dtype_of(settings, device) if settings.lora else torch.float32


@contextmanager
def _named_failures(path: str) -> Iterator[None]:
    """Raises ModelError naming the model, or OSError if it may be there another time."""
    try:
        yield
    except Exception as error:
        reason = one_line(error)
        if is_outage(error):
            raise OSError(
                f"model {path} cannot be loaded for now, from a folder or the hub: {reason}; it is tried again until "
                "disk and network are in order"
            ) from error
        if is_out_of_memory(error) or not isinstance(error, OF_MODELS):
            raise
        raise ModelError(
            f"model {path} cannot be loaded, from a folder or the hub: {reason}; correct "
            "model.path, or download it first"
        ) from error


def _in_4_bits(settings: ModelSettings, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Options for transformers to load it with, see `NF4`."""
    if find_spec("bitsandbytes") is None:
        raise ModelError(
            f"model {settings.path}: quantization {settings.quantization} needs bitsandbytes, which is not installed: "
            "pip install '.[learner,quantized]' in rollstream's checkout"
        )
    from transformers import BitsAndBytesConfig

    return {
        "quantization_config": BitsAndBytesConfig(**NF4, bnb_4bit_compute_dtype=dtype),
        "device_map": {"": device},
    }


def _linear_modules(module: Any) -> list[str]:
    """Last parts of the names of all linear layers but the head, in order; peft would name each layer's by itself."""
    from transformers.pytorch_utils import Conv1D

    head = module.get_output_embeddings()
    named = [(name, one) for name, one in module.named_modules() if isinstance(one, torch.nn.Linear | Conv1D)]
    return sorted({name.rpartition(".")[2] for name, one in named if one is not head})


def _with_adapters(module: Any, settings: ModelSettings) -> Any:
    from peft import LoraConfig, get_peft_model

    lora: LoraSettings = settings.lora or LoraSettings()
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]
        lora_dropout=lora.dropout,
        target_modules=_linear_modules(module) if lora.target_modules == ALL_LINEAR else list(lora.target_modules),
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        task_type="CAUSAL_LM",
    )
    try:
        return get_peft_model(module, config)
    except ValueError as error:
        raise ModelError(
            f"model {settings.path} cannot have the adapter of model.lora, correct it: {one_line(error)}"
        ) from error
