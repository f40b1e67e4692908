"""Check a run's settings for those that vLLM refuses, drops or misreads, and report them as one error before the run
begins.
"""

import logging
import os
from pathlib import Path

from rollstream.producers.engines.vllm.asking import check_temperature
from rollstream.producers.engines.vllm.child import check_settings
from rollstream.schemas.config import RunConfig
from rollstream.schemas.devices import MODEL_LOADING
from rollstream.schemas.engine_settings import VllmSettings
from rollstream.schemas.errors import ConfigError, PromptRefusedError
from rollstream.schemas.finetuning import builder_path
from rollstream.schemas.settings import LoraSettings
from rollstream.schemas.variables import expand, one_line

ENDS = frozenset({"lm_head", "embed_tokens", "embed_out", "wte", "all-linear"})
"""Names of target_modules that vLLM drops, or of which it is not known whether they hold such a one."""

logger = logging.getLogger(__name__)


def check(settings: VllmSettings, config: RunConfig) -> None:
    """Raises ConfigError for this, and for too little room for the versions in use.

    The weights of each version are checked again, by their own configuration (`engines.vllm.version_files`).
    """
    location = builder_path(config.finetuning)
    sampling = config.builder.sampling
    if sampling.record_kept_ids and sampling.top_p < 1 and not sampling.top_k:
        raise ConfigError(
            f"{location}.sampling: with top_p, vLLM reports kept ids only among the top_k likeliest tokens; set "
            "top_k, such as 50, or record_kept_ids: false"
        )
    try:
        check_temperature(sampling)
    except PromptRefusedError as error:
        raise ConfigError(f"{location}.sampling.{error}") from error
    _check_league(config, location)
    models = {name: one.adapter.model for name, one in config.trained().items()}
    _check_adapters(config, settings)
    needed: dict[str, int] = {}
    for model in models.values():
        if model.lora is not None:
            needed[model.path] = needed.get(model.path, 0) + config.adapter.max_staleness + 2
    league = config.builder.league
    for path, least in needed.items():
        loaded = league.max_loaded if league is not None else 0
        if settings.max_loras < least + loaded:
            raise ConfigError(
                f"{location}.engine.max_loras: {settings.max_loras} is too few for {path}: max_staleness "
                f"{config.adapter.max_staleness} + 2 for each model group"
                + (f", and {loaded} opponents," if loaded else "")
                + f" make {least + loaded}; raise it"
            )
    held = {(model.path, None if model.lora else name) for name, model in models.items()}
    if settings.base_urls and len(held) > 1:
        raise ConfigError(
            f"{location}.engine.base_urls: a server has one model group's full weights, or adapters of one base model, "
            f"and the run trains {len(held)} such; leave base_urls out, or train all as adapters of one model"
        )
    check_settings(settings)


def _check_league(config: RunConfig, location: str) -> None:
    """A version of full weights takes a whole server: one that the run did not start, or a further one on its GPU."""
    league = config.builder.league
    if league is None or league.latest_ratio == 1 or not (league.pool or league.frozen):
        return
    for agent, group in config.agents.items():
        one = config.trained().get(group)
        if one is not None and one.adapter.model.lora is None and agent in (league.seats or config.agents):
            raise ConfigError(
                f"{location}.league: past versions of {group} would need a vLLM server each, as all its weights are "
                "trained; train an adapter (model.lora), use engine.kind transformers, or play scripted opponents "
                "alone (pool: 0, no frozen)"
            )


def _check_adapters(config: RunConfig, settings: VllmSettings) -> None:
    for name, one in config.trained().items():
        lora, location = one.adapter.model.lora, config.group_path(name, "model.lora")
        if lora is None:
            continue
        if lora.use_dora:
            raise ConfigError(f"{location}.use_dora: vLLM takes DoRA for LoRA; leave it out, or another engine")
        if odd := sorted(ENDS.intersection(name.rpartition(".")[2] for name in lora.target_modules)):
            raise ConfigError(
                f"{location}.target_modules: {odd[0]}: vLLM drops adapters of embeddings and of the head; "
                "name the linear modules between them"
            )
        if lora.rank > settings.max_lora_rank:
            limit = settings.max_lora_rank
            raise ConfigError(f"{location}.rank: {lora.rank} is above engine.max_lora_rank {limit}; raise that")
        _check_layers(lora, str(expand(one.adapter.model.path, os.environ, location)), f"{location}.target_modules")


def _check_layers(lora: LoraSettings, path: str, location: str) -> None:
    """Raises ConfigError for an adapter on other than linear layers, such as experts in one tensor. A model that is not
    on this machine, or cannot be read, is left to the services.
    """
    import torch
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraLayer
    from transformers import AutoConfig, AutoModelForCausalLM

    if lora.target_modules == "all-linear":
        return
    try:
        named = str(folder) if (folder := Path(path).expanduser()).is_dir() else path
        config = AutoConfig.from_pretrained(named, trust_remote_code=False, local_files_only=True)
        with MODEL_LOADING, torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config, trust_remote_code=False, attn_implementation="eager")
            linear = {name for name, layer in module.named_modules() if isinstance(layer, torch.nn.Linear)}
            wanted = LoraConfig(r=lora.rank, target_modules=list(lora.target_modules), task_type="CAUSAL_LM")
            layers = get_peft_model(module, wanted).get_base_model().named_modules()
            adapted = {name for name, layer in layers if isinstance(layer, LoraLayer)}
    except Exception as error:  # noqa: BLE001 -- models' own code, and checks of many kinds of their configurations
        logger.info("the adapter of model %s is not known: %s", path, one_line(error))
        return
    odd, known = (
        {name.removesuffix(".base_layer").rpartition(".")[2] for name in names} for names in (adapted - linear, linear)
    )
    if odd:
        names = ", ".join(sorted(known - ENDS))
        remedy = f"name some of {names}, or use another engine" if names else "use another engine"
        raise ConfigError(
            f"{location}: {', '.join(lora.target_modules)}: of model {path} they include {', '.join(sorted(odd))}, "
            f"and vLLM serves adapters of linear layers alone; {remedy}"
        )
