"""Options and commands of other programs, and what they are called here. No MLX, no MPI.

The words are those of Hugging Face's Trainer and TRL, axolotl, unsloth, LLaMA-Factory, torchtune,
vLLM, llama.cpp, Ollama and mlx-lm.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from shardmlx.config.options import Declared

_NAMES: Mapping[str, str] = MappingProxyType(
    {
        # Training
        "learning_rate": "lr peak_lr base_lr",
        "epochs": "num_train_epochs num_epochs n_epochs epoch max_epochs",
        "iters": "max_steps num_steps steps n_steps max_iters iterations num_iterations num_iters "
        "total_steps",
        "batch_size": "per_device_train_batch_size per_device_eval_batch_size train_batch_size "
        "eval_batch_size global_batch_size bs max_num_seqs parallel num_parallel",
        "grad_accumulation_steps": "gradient_accumulation_steps gradient_accumulation grad_accum",
        "grad_checkpoint": "gradient_checkpointing use_gradient_checkpointing "
        "enable_activation_checkpointing activation_checkpointing",
        "max_seq_length": "max_length max_seq_len sequence_len sequence_length seq_len seq_length "
        "cutoff_len model_max_length block_size context_length",
        "steps_per_eval": "eval_steps val_every eval_every eval_interval val_interval "
        "val_check_interval run_val_every_n_steps evals_per_epoch",
        "steps_per_report": "logging_steps log_every log_every_n_steps log_interval report_every",
        "save_every": "save_steps save_interval saves_per_epoch",
        "keep_checkpoints": "save_total_limit max_checkpoints",
        "val_batches": "eval_batches eval_iters max_eval_samples",
        "max_grad_norm": "clip_grad_norm gradient_clip_val grad_clip gradient_clipping",
        "optimizer": "optim optimiser",
        "lr_schedule": "lr_scheduler_type lr_scheduler scheduler",
        "warmup": "warmup_steps num_warmup_steps lr_warmup_steps warmup_ratio",
        "early_stop": "early_stopping_patience patience early_stopping",
        "mask_prompt": "completion_only_loss train_on_inputs train_on_prompt",
        "pack": "packing sample_packing packed",
        "zero": "deepspeed fsdp fsdp_config zero_stage",
        "objective": "rl pref_loss preference_loss",
        "beta": "dpo_beta pref_beta rl_beta orpo_alpha",
        "train": "do_train",
        "test": "do_predict do_test",
        # Adapters
        "lora_rank": "lora_r r lora_dim adapter_rank",
        "lora_keys": "lora_target_modules target_modules lora_target lora_attn_modules",
        "num_layers": "lora_layers n_layers freeze_trainable_layers",
        "fine_tune_type": "finetuning_type finetune_type train_type tuner_type",
        "resume_adapter_file": "adapter_file lora_model_dir adapter_name_or_path",
        # Model and data
        "model": "model_name_or_path base_model model_name pretrained_model_name_or_path model_id "
        "model_path hf_path",
        "revision": "model_revision branch",
        "dtype": "torch_dtype precision mixed_precision",
        "data": "dataset dataset_name datasets data_path dataset_path data_dir dataset_dir "
        "train_file train_data data_files",
        "text_feature": "dataset_text_field text_column text_field",
        # Layout
        "pipeline_stages": "pipeline_parallel_size pipeline_model_parallel_size pp pp_size "
        "pipeline_parallel_degree",
        "tensor_parallel": "tensor_parallel_size tensor_model_parallel_size tp tp_size "
        "tensor_parallel_degree",
        "data_parallel": "data_parallel_size dp dp_size replicas num_replicas",
        "hostfile": "hosts machinefile machine_file hostlist",
        "memory_limit": "gpu_memory_utilization max_memory",
        "resume": "resume_from_checkpoint load_checkpoint",
        # Reports
        "project_name": "wandb_project",
        "metrics_file": "logging_dir log_dir log_file",
        # Use
        "max_tokens": "max_new_tokens n_predict num_predict max_length",
        "temp": "temperature",
        "cache_tokens": "max_model_len num_ctx ctx_size n_ctx context_length",
        "max_kv_size": "max_model_len num_ctx ctx_size n_ctx context_length",
        "system_prompt": "system system_message",
        "prompts": "prompt_file input_file prompts_file",
        "draft": "speculative_model model_draft",
        "num_draft_tokens": "num_speculative_tokens draft_max",
        "served_model_name": "alias model_alias",
        "num_shots": "num_fewshot",
        "quantize": "quantization quant bits",
        # A model in export, and adapters elsewhere
        "output_dir": "out_dir save_dir output outfile",
        "adapter_path": "output_dir out_dir save_dir save_path output adapter adapters "
        "adapter_dir lora lora_modules",
    }
)
"""Options, and other programs' words for the same; of several the first that a command has."""

_VALUES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "bf16": ("dtype", "bfloat16"),
        "fp16": ("dtype", "float16"),
        "fp32": ("dtype", "float32"),
        "use_dora": ("fine_tune_type", "dora"),
        "dora": ("fine_tune_type", "dora"),
        "use_lora": ("fine_tune_type", "lora"),
        "qlora": ("fine_tune_type", "lora"),
        "full": ("fine_tune_type", "full"),
        "full_finetune": ("fine_tune_type", "full"),
        "full_finetuning": ("fine_tune_type", "full"),
        "assistant_only_loss": ("loss_on", "assistant"),
        "train_on_responses_only": ("loss_on", "assistant"),
        "roles_to_train": ("loss_on", "assistant"),
        "load_best_model_at_end": ("keep", "best"),
        "tensorboard": ("report_to", "tensorboard"),
        "wandb": ("report_to", "wandb"),
        "use_wandb": ("report_to", "wandb"),
        "overwrite_output_dir": ("resume", "never"),
        "use_cpu": ("device", "cpu"),
        "no_cuda": ("device", "cpu"),
        "dpo": ("objective", "dpo"),
        "orpo": ("objective", "orpo"),
        "kto": ("objective", "kto"),
        "load_in_4bit": ("quantize", "4"),
    }
)
"""Words of other programs, and the option and its value that say the same."""

_NOTES: Mapping[str, str] = MappingProxyType(
    {
        "per_device_train_batch_size": "of all machines together",
        "per_device_eval_batch_size": "of all machines together",
        "warmup_ratio": "a number of updates",
        "evals_per_epoch": "a number of steps",
        "saves_per_epoch": "a number of steps",
        "train_on_inputs": "it means the opposite",
        "train_on_prompt": "it means the opposite",
        "gpu_memory_utilization": "a size, like 12GiB",
        "qlora": "a quantised model is trained as it is",
        "orpo_alpha": "with --objective orpo",
    }
)

_OTHERWISE: Mapping[str, str] = MappingProxyType(
    {
        "write it into a YAML file (-c FILE): optimizer: adamw, and optimizer_config: {adamw: "
        "{weight_decay: 0.01, betas: [0.9, 0.999], eps: 1e-8}}": "weight_decay adam_beta1 "
        "adam_beta2 adam_epsilon betas",
        "shardmlx export MODEL --quantize 4 --output-dir DIR makes a model of 4 bits: train "
        "that": "load_in_4bit load_in_8bit quantization_bit",
        "leave it out: attention is MLX's, fused where it can be": "flash_attention flash_attn "
        "attn_implementation xformers",
        "leave it out: layers go to machines by their memory and speed": "device_map n_gpu_layers "
        "ngl tensor_split",
        "start ranks, on this machine or by --hostfile: shardmlx launch -n N {command} ...": "n np "
        "num_gpus gpus nproc_per_node num_processes nnodes",
        "upload what is finished: hf upload OWNER/NAME DIR": "push_to_hub hub_model_id upload_repo",
        "write the rows of validation into valid.jsonl, beside train.jsonl": "val_set_size "
        "val_size validation_split eval_dataset",
        "give --lora-scale: rsLoRA's is alpha / sqrt(rank)": "use_rslora",
        "the model's own chat_template.jinja is used: change that": "template chat_template",
    }
)
"""Remedies, and the words for what is done so here; ``{command}`` is the command's name."""

_COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "shardmlx export MODEL --adapter-path adapters --output-dir DIR": "fuse merge",
        "shardmlx export MODEL --quantize 4 --output-dir DIR": "convert quantize quant",
        "shardmlx train --model MODEL --data DIR": "finetune fine-tune lora qlora dora sft tune",
        "shardmlx train --model MODEL --data DIR --objective dpo": "dpo orpo kto preferences",
        "shardmlx serve --model MODEL": "server",
        "shardmlx chat --model MODEL": "run",
        "shardmlx generate --model MODEL --prompt TEXT": "complete infer predict",
        "shardmlx evaluate --model MODEL --data DIR": "eval perplexity",
        "shardmlx --help": "help",
        "shardmlx --version": "version",
        "hf upload OWNER/NAME DIR": "upload push",
        "hf download OWNER/NAME (commands download what they need)": "download pull",
    }
)
"""Commands, and other programs' words for the same."""


def command_here(word: str) -> str:
    """Return what does the same as another program's command; empty where nothing is known."""
    found = _in(_COMMANDS, word.lower())
    return found and f"use {found}"


def _in(table: Mapping[str, str], word: str) -> str:
    return next((each for each, words in table.items() if word in words.split()), "")


def option_here(word: str, known: Iterable[Declared], command: str, *, as_flag: bool) -> str:
    """Return what another program's flag or key is called among the ``known`` options of a command;
    empty where nothing is known."""
    key = word.partition("=")[0].lstrip("-").replace("-", "_").lower()
    key = key.rpartition(".")[2].removeprefix("no_")  # optimizer.lr=1e-4, as torchtune has it
    named = {each.name: each for each in known}
    name, value = _VALUES.get(key, ("", ""))
    if name not in named:
        same = (each for each, words in _NAMES.items() if each == key or key in words.split())
        name = next((each for each in same if each in named), key)
        value = ""
    if name not in named:
        return _in(_OTHERWISE, key).replace("{command}", command)
    option = named[name]
    if option.rules.positional:
        return f"it is the first word after {command}, without a flag"
    if as_flag and not option.rules.flag:
        return f"write {name} into the YAML file: -c FILE"
    shown = f"{option.flag} {value}" if as_flag else f"{name}: {value}"
    note = f" ({_NOTES[key]})" if key in _NOTES else ""
    return f"it is {shown.rstrip(': ')} here{note}"
