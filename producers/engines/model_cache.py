"""The models that an engine generates with: base models from folders, and the weight versions copied into them.

Full weights have a module for each model group; adapters of all groups share one module for each base model.
A version is checked before anything is changed: one that does not fit leaves the version before it whole.
Not thread-safe.
"""

import os
import re
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.utils.logging import disable_progress_bar

from rollstream.eventlog.disk_space import is_outage
from rollstream.producers.engines.chat_tokenizer import check_folder, load_tokenizer
from rollstream.producers.engines.generation import Model, check_cache
from rollstream.producers.engines.kv_pool import PoolShape, probed_shape
from rollstream.schemas.devices import MODEL_LOADING, choose_cublas_workspace, device_of
from rollstream.schemas.engine_settings import TransformersSettings
from rollstream.schemas.errors import ModelError, is_of_device, is_out_of_memory
from rollstream.schemas.events import WeightsPublished
from rollstream.schemas.settings import NF4, has_embeddings
from rollstream.schemas.variables import one_line

Shape = tuple[int, ...]
_EXPERTS = re.compile(r"\.\*\\\.(\w|\\\.)+")
"""Key of a pattern that peft makes for a parameter with all experts of a layer: `.*\\.gate_up_proj`."""
_DRAW = frozenset({"uniform_", "normal_", "kaiming_uniform_"})
"""Names of functions of torch, and of what transformers puts in their place, that fill a tensor with random numbers."""


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A weight version of a model group that is in memory."""

    published: WeightsPublished
    model: Model
    tokenizer: Any
    max_length: int | None
    """Most tokens of a sequence; None if the model says nothing."""
    num_token_ids: int
    """Token ids that the model has an embedding for."""
    pool_shape: PoolShape | None = None
    """Shape of the model's keys and values; None: batches of this model are static."""
    adapter: str | None = None

    def shares_tensors(self, other: "LoadedModel") -> bool:
        """Whether both are the same tensors, so that only the version that was loaded last is in them."""
        return self.model.module is other.model.module and self.adapter == other.adapter

    def activate(self) -> None:
        """Let the module compute with this group's adapter, if it is one of several."""
        if self.adapter is not None and self.model.module.active_adapter != self.adapter:
            self.model.module.set_adapter(self.adapter, inference_mode=True)


class _DrawsNothing(TorchFunctionMode):
    """Zeros in place of random numbers, in this thread: starting values, which a version's own replace.

    Torch has one generator of random numbers a process, and a learner in another thread draws its dropout from it.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function that is meant, or what stands in for it."""
        named = kwargs or {}
        if getattr(func, "__name__", None) in _DRAW:
            with torch.no_grad():
                return (args[0] if args else named["tensor"]).zero_()
        return (torch.zeros if func is torch.randn else func)(*args, **named)


BaseKey = tuple[str, str | None, str]
"""A base model below adapters, and how it is quantized."""


class ModelCache:
    """Models by model group."""

    def __init__(self, settings: TransformersSettings) -> None:
        """Raises ModelError if the settings ask for a GPU and there is none."""
        choose_cublas_workspace(os.environ)  # a learner in this process may be deterministic
        self._is_continuous = settings.is_continuous
        self.device = torch.device(device_of(settings.device, torch.cuda.device_count(), "engine.device"))
        wants_half = settings.dtype == "bfloat16" or (settings.dtype == "auto" and self.device.type == "cuda")
        self.dtype = torch.bfloat16 if wants_half else torch.float32
        self._is_deterministic = settings.deterministic
        self._held: dict[str, LoadedModel] = {}
        self._adapted: dict[BaseKey, Any] = {}
        """PEFT model by base model."""
        self._idle: LoadedModel | None = None
        """The module with full weights that was unloaded last."""
        self._spares: dict[str, LoadedModel] = {}
        """Adapters that no row uses any more, kept for the next version, by model group."""
        self._num_adapters = 0
        disable_progress_bar()

    def held(self, model_group: str) -> LoadedModel | None:
        """The model that a model group generates with now; None before its first version."""
        return self._held.get(model_group)

    def load(
        self, published: WeightsPublished, tensors: dict[str, Tensor], where: str, *, in_place: bool = True
    ) -> None:
        """Take over a version. `in_place`: no row is generated with the version before, so its memory is used again;
        else that goes on until it is released. Raises ModelError; then the version before it stays.
        """
        load = self._load_adapter if published.weights_format == "lora" else self._load_full
        try:
            with MODEL_LOADING, _DrawsNothing():
                self._held[published.model_group] = load(published, tensors, where, in_place)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            failure = error.with_traceback(None)  # which holds the tensors
            raise ModelError(
                f"{where} do not fit into the memory of {self.device} ({one_line(error)}); lower engine.kv_cache_mb, "
                "prefix_cache_mb or full_copies, or take a device with more memory"
            ) from failure

    def release(self, held: LoadedModel) -> None:
        """A version that is not held any more, and that no row is generated with."""
        current = self._held.get(held.published.model_group)
        if current is not None and current.shares_tensors(held):
            return
        if held.adapter is None:
            self._idle = held
        elif current is None or held.published.model_group in self._spares:
            self._remove_adapter(_base_of(held.published), held.adapter)
        else:
            self._spares[held.published.model_group] = held

    def unload(self, model_group: str) -> None:
        """Forget a model group; its base model too, if no other group's adapter needs it.

        One module with full weights stays for the next model group on its base model, which need not be read again.
        """
        held = self._held.get(model_group)
        self._forget(model_group)
        spare = self._spares.pop(model_group, None)
        if spare is not None and spare.adapter is not None:
            self._remove_adapter(_base_of(spare.published), spare.adapter)
        if held is not None and held.adapter is None:
            self._idle = held

    def _forget(self, model_group: str) -> None:
        held = self._held.pop(model_group, None)
        if held is not None and held.adapter is not None:
            self._remove_adapter(_base_of(held.published), held.adapter)

    def _load_full(
        self, published: WeightsPublished, tensors: Mapping[str, Tensor], where: str, in_place: bool
    ) -> LoadedModel:
        before = self._held.get(published.model_group)
        is_usable = in_place and before is not None and before.adapter is None
        if before is None or not is_usable or before.published.base_model != published.base_model:
            fresh = self._fresh(published)
            self._copy_full(fresh.model.module, tensors, where)
            if in_place:
                self._forget(published.model_group)
            return fresh
        self._copy_full(before.model.module, tensors, where)
        return replace(before, published=published)

    def _fresh(self, published: WeightsPublished) -> LoadedModel:
        """A module of a base model, with any weights."""
        idle, self._idle = self._idle, None
        if idle is not None and idle.published.base_model == published.base_model:
            return replace(idle, published=published)
        del idle  # before another one takes memory
        return self._wrap(published, _load_base(published, self.dtype, self.device))

    def _copy_full(self, module: Any, tensors: Mapping[str, Tensor], where: str) -> None:
        tied = set(getattr(module, "all_tied_weights_keys", None) or ())
        own = {name: value for name, value in module.state_dict().items() if name not in tied}
        given = {name: value for name, value in tensors.items() if name not in tied}
        check_fit(shapes_of(own), shapes_of(given), where)
        # In place: tied tensors share their storage, so they stay tied. It takes no memory of the device.
        with torch.no_grad():
            for name, value in own.items():
                value.copy_(given[name])

    def _load_adapter(
        self, published: WeightsPublished, tensors: dict[str, Tensor], where: str, in_place: bool
    ) -> LoadedModel:
        from peft import get_peft_model_state_dict, set_peft_model_state_dict

        before = (self._held if in_place else self._spares).get(published.model_group)
        is_same = (
            before is not None
            and before.adapter is not None
            and _base_of(before.published) == _base_of(published)
            and before.published.lora == published.lora
        )
        adapter = before.adapter if before is not None and is_same else None
        module, name = (before.model.module, adapter) if before and adapter else self._add_adapter(published, where)
        try:
            own = get_peft_model_state_dict(module, adapter_name=name, save_embedding_layers=False)
            beside = _base_weights_beside(module, name, tensors)
            check_fit(shapes_of(own | beside), shapes_of(tensors), where)
            # Whatever needs memory of the device comes before the version there is changed.
            moved = {key: tensors[key].to(value.device, value.dtype) for key, value in own.items()}
            set_peft_model_state_dict(module, moved, adapter_name=name)
            if before is not None and adapter is not None:
                if not in_place:
                    del self._spares[published.model_group]
                return replace(before, published=published)
            fresh = self._wrap(published, module, name)
        except Exception:
            if adapter is None:
                self._remove_adapter(_base_of(published), name)
            raise
        if in_place:
            self._forget(published.model_group)
        return fresh

    def _add_adapter(self, published: WeightsPublished, where: str) -> tuple[Any, str]:
        from peft import get_peft_model

        name = f"adapter_{self._num_adapters}"
        self._num_adapters += 1
        module = self._adapted.get(_base_of(published))
        try:
            config = _adapter_config(published.lora or {}, where)
            if module is None:
                base = _load_base(published, self.dtype, self.device)
                module = get_peft_model(base, config, adapter_name=name)
                self._adapted[_base_of(published)] = module
            else:
                _add_beside_others(module, name, config)
        except (KeyError, TypeError, ValueError) as error:
            base, remedy = published.base_model, "load the base model that it was trained on"
            if "must target the same set of parameters" in str(error):  # peft, of adapters on experts in one tensor
                remedy = f"give all model groups of {base} the same experts in lora.target_modules, or a copy each"
            raise ModelError(f"{where}: its adapter does not fit {base}: {one_line(error)}; {remedy}") from error
        module.eval()
        return module, name

    def _remove_adapter(self, base: BaseKey, name: str) -> None:
        module = self._adapted[base]
        if len(module.peft_config) == 1:
            del self._adapted[base]
        else:
            _delete_adapter(module, name)

    def _wrap(self, published: WeightsPublished, module: Any, adapter: str | None = None) -> LoadedModel:
        module.eval()
        tokenizer = load_tokenizer(published.base_model)
        end_ids = {tokenizer.eos_token_id}
        configured = getattr(getattr(module, "generation_config", None), "eos_token_id", None)
        end_ids |= set(configured if isinstance(configured, list) else () if configured is None else (configured,))
        pad_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        model = Model(module, self.device, tuple(sorted(end_ids)), pad_id, self._is_deterministic)
        max_length = getattr(module.config.get_text_config(), "max_position_embeddings", None)
        num_token_ids = len(module.get_input_embeddings().weight)
        shape = probed_shape(module, self.device) if self._is_continuous else None
        if shape is None:
            check_cache(model, is_batched=not self._is_deterministic)
        return LoadedModel(published, model, tokenizer, max_length, num_token_ids, shape, adapter)


def _base_weights_beside(module: Any, name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The model's own weights of which an adapter on the embeddings or the head has copies in `tensors`.

    Adapters do not change them, and others may be on the same model, so only their shapes are compared.
    """
    from peft import get_peft_model_state_dict

    if not has_embeddings(module.peft_config[name].target_modules):
        return {}
    whole = get_peft_model_state_dict(module, adapter_name=name, save_embedding_layers=True)
    return {key: value for key, value in whole.items() if key in tensors and ".base_layer." in key}


def _add_beside_others(module: Any, name: str, config: Any) -> None:
    """Add one of several adapters, or nothing of it."""
    try:
        module.add_adapter(name, config)
    except Exception:
        module.peft_config[name] = config  # which peft has forgotten, but not the layers that it is in
        _delete_adapter(module, name)
        raise


def _delete_adapter(module: Any, name: str) -> None:
    """Delete one of several adapters."""
    module.set_adapter(next(other for other in module.peft_config if other != name), inference_mode=True)
    module.delete_adapter(name)


def _adapter_config(recorded: Mapping[str, Any], where: str) -> Any:
    """The adapter that a record describes, from the settings that our learner uses. Raises ModelError beginning with
    `where` for another kind of adapter, and KeyError, TypeError, ValueError.

    The other keys of a peft configuration are left alone: of some, peft imports modules, opens files or compiles
    regular expressions. Of patterns, only those are taken over that peft makes for experts in one tensor.
    """
    from peft import LoraConfig

    modules = recorded.get("target_modules")
    if recorded.get("peft_type", "LORA") != "LORA" or not isinstance(modules, list):
        raise ModelError(
            f"{where}: its adapter is not LoRA with a list of target_modules; publish one that is (lora.peft_type "
            "LORA, lora.target_modules a list of names), or full weights"
        )
    return LoraConfig(
        r=int(recorded["r"]),
        lora_alpha=recorded["lora_alpha"],
        lora_dropout=float(recorded.get("lora_dropout", 0.0)),
        target_modules=[str(name) for name in modules],
        target_parameters=[str(name) for name in recorded.get("target_parameters") or ()] or None,
        rank_pattern={key: int(value) for key, value in _pattern(recorded, "rank_pattern", where)},
        alpha_pattern={key: float(value) for key, value in _pattern(recorded, "alpha_pattern", where)},
        use_rslora=bool(recorded.get("use_rslora", False)),
        use_dora=bool(recorded.get("use_dora", False)),
        task_type="CAUSAL_LM",
        inference_mode=True,
    )


def _pattern(recorded: Mapping[str, Any], key: str, where: str) -> Iterable[tuple[str, Any]]:
    found = dict(recorded.get(key) or {})
    if odd := sorted(name for name in found if not _EXPERTS.fullmatch(name)):
        raise ModelError(
            f"{where}: {key} of its adapter has {odd[0]!r}, which is not loaded here; give all its modules one rank "
            "and alpha"
        )
    return found.items()


def read_weights(path: Path, where: str) -> dict[str, Tensor]:
    """Tensors of a file by name. Raises ModelError naming file and remedy, OSError if its disk may be back."""
    with named_unreadable(where):
        return load_file(path)


@contextmanager
def named_unreadable(where: str) -> Generator[None]:
    """Raises ModelError naming a version's unreadable file and the remedy, OSError if its disk may be back."""
    try:
        yield
    except (OSError, safetensors.SafetensorError) as error:
        if is_outage(error):
            raise OSError(f"{where} cannot be read for now: {one_line(error)}") from error
        raise ModelError(f"{where} cannot be read: {one_line(error)}; publish the version again") from error


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, Shape]:
    """Shape of each tensor by its name."""
    return {name: tuple(value.shape) for name, value in tensors.items()}


def check_fit(own: Mapping[str, Shape], given: Mapping[str, Shape], where: str) -> None:
    """Raises ModelError for tensors that a version lacks, has beyond the model's own, or has in another shape."""
    remedy = "train from the same base model as the run names"
    if missing := sorted(own.keys() - given.keys()):
        raise ModelError(f"{where} lack {len(missing)} tensors, such as {missing[0]}; {remedy}")
    if extra := sorted(given.keys() - own.keys()):
        raise ModelError(
            f"{where} have {len(extra)} tensors that the model does not have, such as {extra[0]}; {remedy}"
        )
    for name, shape in own.items():
        if shape != given[name]:
            raise ModelError(f"{where}: {name} has shape {list(given[name])}, the model has {list(shape)}; {remedy}")


def _base_of(published: WeightsPublished) -> BaseKey:
    return published.base_model, published.quantization, published.base_sha256


def _load_base(published: WeightsPublished, dtype: torch.dtype, device: torch.device) -> Any:
    base_model = published.base_model
    check_folder(base_model)
    how: dict[str, Any] = {}
    if published.quantization is not None:
        config = BitsAndBytesConfig(**NF4, bnb_4bit_compute_dtype=dtype)
        how = {"quantization_config": config, "device_map": {"": device}}
    try:
        module: Any = AutoModelForCausalLM.from_pretrained(base_model, dtype=dtype, trust_remote_code=False, **how)
        for part in module.modules() if how else ():
            part.support_avx512bf16_for_cpu = False  # as in the learner, whose numbers these have to be
        return module.to(device)
    except (OSError, ValueError, ImportError, KeyError, RuntimeError, safetensors.SafetensorError) as error:
        if is_out_of_memory(error) or is_of_device(error):
            raise
        if is_outage(error):
            raise OSError(f"model {base_model} cannot be read for now: {one_line(error)}") from error
        raise ModelError(
            f"model {base_model} cannot be loaded, from a folder or the hub: {one_line(error)}; "
            "correct its path, or download it first"
        ) from error
