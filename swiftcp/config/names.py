"""The names that users type: other tools' names for our keys, and keys that we refuse with advice.

Four literal tables. A name is looked up in this order: a key itself, `ALIASES` (the same meaning), `ADVICE` (another meaning: which
key to set instead), `NOT_BUILT` (known from Megatron-SWIFT, not built yet; the value there changes nothing and is accepted).
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

ALIASES: dict[str, str] = {
    # Command-line shorts.
    "cp": "context_parallel_size",
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "sp": "sequence_parallel",
    # Models.
    "model_name_or_path": "model",
    "base_model": "model",
    "model_path": "model",
    "model_dir": "model",
    "model_revision": "revision",
    "dtype": "torch_dtype",
    "train_type": "tuner_type",
    "sft_type": "tuner_type",
    "finetuning_type": "tuner_type",
    "lora_r": "lora_rank",
    "lora_target": "target_modules",
    "lora_target_modules": "target_modules",
    "additional_target": "modules_to_save",
    "lora_modules_to_save": "modules_to_save",
    "adapter_name_or_path": "adapters",
    "freeze_vision_tower": "freeze_vit",
    "freeze_multi_modal_projector": "freeze_aligner",
    "freeze_language_model": "freeze_llm",
    # Data.
    "datasets": "dataset",
    "train_dataset": "dataset",
    "dataset_path": "dataset",
    "eval_dataset": "val_dataset",
    "dataset_test_ratio": "split_dataset_ratio",
    "cutoff_len": "max_length",
    "sequence_len": "max_length",
    "seq_length": "max_length",
    "max_seq_length": "max_length",
    "max_seq_len": "max_length",
    "model_max_length": "max_length",
    "sample_packing": "packing",
    "num_workers": "dataloader_num_workers",
    # Training.
    "per_device_train_batch_size": "micro_batch_size",
    "train_batch_size": "global_batch_size",
    "num_epochs": "num_train_epochs",
    "max_epochs": "num_train_epochs",
    "epochs": "num_train_epochs",
    "max_steps": "train_iters",
    "learning_rate": "lr",
    "lr_scheduler_type": "lr_decay_style",
    "lr_scheduler": "lr_decay_style",
    "warmup_ratio": "lr_warmup_fraction",
    "warmup_steps": "lr_warmup_iters",
    "adam_epsilon": "adam_eps",
    "max_grad_norm": "clip_grad",
    "gradient_clipping": "clip_grad",
    # Parallelism.
    "context_parallel_degree": "context_parallel_size",
    "cp_size": "context_parallel_size",
    "tensor_parallel_size": "tensor_model_parallel_size",
    "pipeline_parallel_size": "pipeline_model_parallel_size",
    "expert_parallel_size": "expert_model_parallel_size",
    # Checkpoints and logging.
    "save": "output_dir",
    "save_interval": "save_steps",
    "log_interval": "logging_steps",
    "eval_interval": "eval_steps",
    "resume_from_checkpoint": "resume",
    "nproc": "nproc_per_node",
    "random_seed": "seed",
}

ADVICE: dict[str, str] = {
    "attn_implementation": "set attention_backend (auto, te or torch)",
    "attn_impl": "set attention_backend (auto, te or torch)",
    "use_flash_attn": "set attention_backend te: Transformer Engine picks flash or fused attention",
    "bf16": "set torch_dtype bfloat16",
    "fp16": "set torch_dtype bfloat16: float16 is not supported",
    "dp": "data parallelism is what is left of the ranks: set nproc_per_node and the model-parallel sizes",
    "data_parallel_size": "data parallelism is what is left of the ranks: set nproc_per_node and the model-parallel sizes",
    "ulysses_sequence_parallel_size": "set context_parallel_size, and cp_comm_type a2a",
    "sequence_parallel_size": "set context_parallel_size",
    "gradient_accumulation_steps": "set global_batch_size = micro_batch_size x data-parallel size x accumulation steps",
    "per_device_eval_batch_size": "evaluation uses micro_batch_size",
    "gradient_checkpointing": "set recompute_granularity (none, selective or full) and vit_gradient_checkpointing",
    "no_gradient_checkpointing": "set recompute_granularity none",
    "image_max_pixels": "set image_max_token_num: one token is 32 x 32 pixels of Qwen3-VL",
    "image_min_pixels": "set image_min_token_num: one token is 32 x 32 pixels of Qwen3-VL",
    "max_pixels": "set image_max_token_num: one token is 32 x 32 pixels of Qwen3-VL",
    "min_pixels": "set image_min_token_num: one token is 32 x 32 pixels of Qwen3-VL",
    "video_max_pixels": "set video_max_token_num: one token is 32 x 32 pixels of Qwen3-VL",
    "video_min_pixels": "set video_min_token_num: one token is 32 x 32 pixels of Qwen3-VL",
    "video_fps": "set fps",
    "video_maxlen": "set fps_max_frames",
    "val_size": "set split_dataset_ratio (a fraction) or val_dataset",
    "val_set_size": "set split_dataset_ratio (a fraction) or val_dataset",
    "load": "set model to a Hugging Face folder, or resume to a checkpoint folder",
    "mcore_model": "set model to a Hugging Face folder, or resume to a checkpoint folder",
    "no_save_rng": "leave it out: checkpoints always hold the random states",
    "no_load_rng": "leave it out; to start afresh, set model to the run's hf folder and another output_dir",
    "overwrite_output_dir": "leave it out: set resume, or another output_dir",
    "cp_partition": "set cp_partition_mode (auto, zigzag or whole), and cp_comm_type to choose how ranks communicate",
    "local_rank": "leave it out: the launcher says it",
    "nnodes": "set the environment variables NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT, or use torchrun or srun",
    "node_rank": "set the environment variables NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT, or use torchrun or srun",
    "master_addr": "set the environment variables NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT, or use torchrun or srun",
    "master_port": "set the environment variables NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT, or use torchrun or srun",
}

NOT_BUILT: dict[str, str | None] = {
    "lora_bias": "none",
    "adapter_load": None,
    "freeze_parameters": None,
    "freeze_parameters_ratio": None,
    "trainable_parameters": None,
    "revision": None,
    "model_type": None,
    "rope_scaling": None,
    "use_hf": None,
    "lr_decay_iters": None,
    "optimizer": "adam",
    "optimizer_cpu_offload": "false",
    "main_grads_dtype": "fp32",
    "main_params_dtype": "fp32",
    "overlap_grad_reduce": "false",
    "overlap_param_gather": "false",
    "tp_comm_overlap": "false",
    "cross_entropy_loss_fusion": "false",
    "calculate_per_token_loss": "true",
    "padding_free": "true",
    "deterministic_mode": "false",
    "moe_grouped_gemm": None,
    "moe_permute_fusion": "false",
    "moe_shared_expert_overlap": "false",
    "moe_expert_capacity_factor": None,
    "moe_token_dispatcher_type": None,
    "mtp_num_layers": None,
    "fp8_format": None,
    "fp8_recipe": None,
    "fp8_param_gather": "false",
    "enable_dft_loss": "false",
    "enable_channel_loss": "false",
    "task_type": "causal_lm",
    "streaming": "false",
    "lazy_tokenize": None,
    "cached_dataset": None,
    "load_from_cache_file": None,
    "dataset_num_proc": None,
    "dataset_shuffle": "true",
    "train_dataloader_shuffle": "true",
    "data_seed": None,
    "interleave_prob": None,
    "group_by_length": "false",
    "template": None,
    "system": None,
    "agent_template": None,
    "add_non_thinking_prefix": None,
    "save_strategy": "steps",
    "load_safetensors": "true",
    "add_version": "false",
    "finetune": "true",
    "tensorboard_dir": None,
    "wandb_project": None,
    "wandb_exp_name": None,
    "log_throughput": None,
    "logging_dir": None,
    "trust_remote_code": "false",
}


def normalize(name: str) -> str:
    """`--Max-Length` and `max_length` are one name."""
    return name.strip().lstrip("-").replace("-", "_").lower()


def nearest(name: str, keys: Iterable[str]) -> str | None:
    """The key that a mistyped name most likely means."""
    known = {**{alias: key for alias, key in ALIASES.items() if len(alias) > 3}, **{key: key for key in keys}}
    matches = get_close_matches(name, known, n=3, cutoff=0.6)
    return next((known[match] for match in matches if known[match] in set(keys)), None)


def unknown(name: str, keys: Iterable[str]) -> str:
    """What to tell a user who gave a name that is no key."""
    suggestion = nearest(name, keys)
    return f"unknown key '{name}'" + (f": did you mean '{suggestion}'?" if suggestion else ": see --help for the keys")
