"""What can be configured: one model per concern, flat keys in one namespace.

Invariant: a field's docstring is its help text and names its unit; a field without a default is required; a default of None is
filled in by `swiftcp.config.validate`, as the docstring says, unless it says that None means something.
"""

from __future__ import annotations

from math import lcm
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from swiftcp.config.concern import Concern, PathText
from swiftcp.config.tuner import AdapterConfig, TunerConfig

TrainingMode = Literal["sft", "pt"]
LossScale = Literal[
    "default",
    "last_round",
    "all",
    "ignore_empty_think",
    "default+ignore_empty_think",
    "last_round+ignore_empty_think",
    "all+ignore_empty_think",
]
TruncationStrategy = Literal["raise", "delete", "left", "right"]
StateType = Literal["fp32", "bf16", "fp16", "fp8"]
"""Number format of the optimizer's state."""


class ModelConfig(Concern):
    """Which checkpoint, and in which number format."""

    panel = "Model"

    model: PathText
    """Hugging Face folder of the checkpoint: config.json, weights, tokenizer, processor."""
    init_from_config: bool = False
    """Start from random weights, made from `seed` and the model folder's config.json. False: a missing weight is an error."""
    torch_dtype: Literal["bfloat16", "float32"] | None = None
    """Number format of weights and activations. Default: bfloat16 on CUDA, float32 on a CPU."""


class FreezeConfig(Concern):
    """Which parts of the model are trained."""

    panel = "Trained parts"

    freeze_llm: bool = False
    """Do not train the language model."""
    freeze_vit: bool = False
    """Do not train the vision tower (Megatron-SWIFT's default is true)."""
    freeze_aligner: bool = False
    """Do not train the mergers between tower and language model, deepstack's included (Megatron-SWIFT's default is true)."""


class DataConfig(Concern):
    """The rows, and what happens to those that do not fit."""

    panel = "Data"

    dataset: list[PathText] = Field(min_length=1)
    """Files or folders of rows, or names on the Hub; `path#N` takes the first N rows of one."""
    max_length: PositiveInt | None = None
    """Longest row, in tokens, media included. Default: what the model was made for (max_position_embeddings), or less to fit a pack."""
    truncation_strategy: TruncationStrategy = "raise"
    """A row longer than `max_length`: `raise` treats it as a bad row (see `strict`), `delete` drops and counts it, `left` and `right` cut
    its beginning or its end off, or drop and count it where that would cut media."""
    strict: bool = True
    """A bad row is an error before the model is built. False: it is dropped, counted and listed in bad_rows.jsonl."""
    loss_scale: LossScale = "default"
    """What `sft` trains: every assistant turn (default), those behind the last user message (last_round), or the whole text (all); with
    `ignore_empty_think`, alone or behind a +, no empty blocks of thoughts. A message's own `loss` wins."""
    dataloader_num_workers: NonNegativeInt | None = None
    """Processes of each rank that read rows ahead; 0: none. Default: the cores shared by the ranks, 4 at most; 0 on a CPU."""


class ValidationDataConfig(Concern):
    """The rows to evaluate on."""

    panel = "Data"

    val_dataset: list[PathText] = Field([])
    """Files or folders of rows for evaluation; `path#N` takes N rows of one."""
    split_dataset_ratio: float = Field(0.0, ge=0, lt=1)
    """Fraction of `dataset` that is kept from training for evaluation, where `val_dataset` is not given."""


class PackingConfig(Concern):
    """How rows become micro-batches."""

    panel = "Packing"

    packing: bool = True
    """Put several rows into one sequence, where they do not see each other (Megatron-SWIFT's default is false)."""
    packing_length: PositiveInt | None = None
    """Length of a pack, in tokens. Default: `max_length`."""
    pack_align: PositiveInt = 64
    """Each row of a pack is padded to a multiple of this many tokens; a multiple of 2 x `context_parallel_size`."""
    micro_batch_size: PositiveInt = 1
    """Packs (1 only) or, without packing, rows that a rank processes at once."""


class MediaConfig(Concern):
    """How large images and videos may become, and how videos are sampled."""

    panel = "Media"

    image_max_token_num: PositiveInt | None = None
    """Largest image, in tokens; larger ones are scaled down. None: as the checkpoint's processor says."""
    image_min_token_num: PositiveInt | None = None
    """Smallest image, in tokens; smaller ones are scaled up. None: as the checkpoint's processor says."""
    video_max_token_num: PositiveInt | None = None
    """Largest video frame, in tokens. None: as the checkpoint's processor says."""
    video_min_token_num: PositiveInt | None = None
    """Smallest video frame, in tokens. None: as the checkpoint's processor says."""
    fps: PositiveFloat | None = None
    """Frames taken from each second of a video. None: as the checkpoint's processor says."""
    fps_min_frames: PositiveInt | None = None
    """Fewest frames taken from a video. None: as the checkpoint's processor says."""
    fps_max_frames: PositiveInt | None = None
    """Most frames taken from a video. None: as the checkpoint's processor says."""
    media_root: PathText | None = None
    """Folder that every file of media must lie in, links followed; others are refused. None: anywhere."""
    allow_http: bool = False
    """Fetch media that are named by http(s):// (never from this machine's own addresses, nor through redirections)."""
    max_image_pixels: PositiveInt | None = None
    """Largest image, in pixels as its header says, that is decoded. None: 178,956,970, Pillow's guard."""
    media_timeout: PositiveFloat = 120.0
    """Seconds after which the decoding of a video or of sound is given up; the row is then a bad one."""


class TrainingConfig(Concern):
    """How much is trained in a step and in all."""

    panel = "Training"

    global_batch_size: PositiveInt = 16
    """Packs (rows without packing) of one optimizer step, over all ranks."""
    num_train_epochs: PositiveInt | None = None
    """Passes over the data. Default: 1, where `train_iters` is not given."""
    train_iters: PositiveInt | None = None
    """Optimizer steps in all; in place of `num_train_epochs`."""


class OptimizerConfig(Concern):
    """AdamW and the learning rate's schedule."""

    panel = "Optimizer"

    lr: PositiveFloat = 1e-5
    """Peak learning rate; 1e-4 where it is left out and `tuner_type` is lora."""
    vit_lr: PositiveFloat | None = None
    """Peak learning rate of the vision tower. Default: `lr`."""
    aligner_lr: PositiveFloat | None = None
    """Peak learning rate of the mergers between tower and language model. Default: `lr`."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the decay."""
    lr_decay_style: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate falls from `lr` to `min_lr`."""
    lr_warmup_fraction: float | None = Field(None, ge=0, lt=1)
    """Fraction of all steps in which the learning rate rises linearly from 0; in place of `lr_warmup_iters`."""
    lr_warmup_iters: NonNegativeInt = 0
    """Steps in which the learning rate rises linearly from 0."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay, relative to the learning rate; biases and norms do not decay."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the gradient's running mean, per step."""
    adam_beta2: float = Field(0.95, ge=0, lt=1)
    """Decay of the squared gradient's running mean, per step."""
    adam_eps: PositiveFloat = 1e-8
    """Added to the root of the squared gradient's mean."""
    clip_grad: NonNegativeFloat = 1.0
    """Largest norm of the whole gradient; 0: no clipping."""
    use_distributed_optimizer: bool | None = None
    """Spread the optimizer's state over the data-parallel ranks. Default: true on CUDA with Transformer Engine."""
    use_precision_aware_optimizer: bool = False
    """Keep of each float32 master weight what its bfloat16 weight lacks (nothing is lost), and the moments in the types given below."""
    exp_avg_dtype: StateType = "fp32"
    """Number format of the gradient's running mean, with `use_precision_aware_optimizer`: fp32, bf16, fp16 or fp8."""
    exp_avg_sq_dtype: StateType = "fp32"
    """Number format of the squared gradient's running mean, with `use_precision_aware_optimizer`: fp32, bf16, fp16 or fp8."""


class ParallelConfig(Concern):
    """How the work is spread over ranks; it does not change the result."""

    panel = "Parallelism"

    tensor_model_parallel_size: PositiveInt = 1
    """Ranks that share each layer's matrices (tp)."""
    sequence_parallel: bool = False
    """Spread the tokens between the matrices over the tensor-parallel ranks too: less memory for activations."""
    pipeline_model_parallel_size: PositiveInt = 1
    """Stages that the layers are spread over (pp)."""
    virtual_pipeline_model_parallel_size: Annotated[int, Field(ge=2)] | None = None
    """Chunks of layers of each stage, interleaved to shorten the waiting at a step's start and end (vpp). None: one."""
    decoder_first_pipeline_num_layers: PositiveInt | None = None
    """Layers of the first stage. None: as many as the others."""
    decoder_last_pipeline_num_layers: PositiveInt | None = None
    """Layers of the last stage. None: as many as the others."""
    context_parallel_size: PositiveInt = 1
    """Ranks that share each sequence (cp). Ranks beyond tp x pp x cp are data parallel."""
    cp_comm_type: Literal["p2p", "a2a", "all_gather", "a2a+p2p"] = "p2p"
    """How ranks that share a sequence exchange keys and values in Transformer Engine's attention."""
    cp_partition_mode: Literal["auto", "zigzag", "whole"] = "zigzag"
    """Sequences of a pack that are cut among these ranks: `zigzag` all, `whole` only those that cannot stay whole on one rank each,
    `auto`, pack by pack, what is expected to take less time."""
    hierarchical_context_parallel_sizes: list[PositiveInt] | None = None
    """With `cp_comm_type` a2a+p2p: ranks of the inner (a2a) and number of the outer (p2p) groups; their product is cp."""
    expert_model_parallel_size: PositiveInt = 1
    """Ranks that the experts of each layer are spread over (ep): ranks of tp x cp x dp, of one pipeline stage."""
    expert_tensor_parallel_size: PositiveInt = 1
    """Ranks that share each expert's matrices (etp), whatever tp is."""
    attention_backend: Literal["auto", "te", "torch"] = "auto"
    """Core attention: `te` is Transformer Engine's (flash or fused, as it sees fit), `torch` runs everywhere, `auto` says what it took."""

    @property
    def model_parallel_size(self) -> int:
        """Ranks of one replica of the model: tp x pp x cp."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def expert_parallel_size(self) -> int:
        """Ranks that hold all experts once: pp x ep x etp."""
        return self.pipeline_model_parallel_size * self.expert_model_parallel_size * self.expert_tensor_parallel_size

    @property
    def fewest_ranks(self) -> int:
        """The smallest world that replicas of the model and of its experts both divide."""
        return lcm(self.model_parallel_size, self.expert_parallel_size)


class RouterConfig(Concern):
    """How tokens find their experts, in models that have experts."""

    panel = "Experts"

    moe_router_dtype: Literal["fp32", "none"] = "fp32"
    """Number format in which routers multiply: fp32, or that of the model (none), as `transformers` does; their softmax is fp32."""


class RouterLossConfig(Concern):
    """What routers are trained for, beside the loss of the labels."""

    panel = "Experts"

    moe_aux_loss_coeff: NonNegativeFloat = 0.0
    """Weight of each layer's load-balancing loss, which is 1 where experts are used evenly. It does not depend on the number of labels."""
    moe_z_loss_coeff: NonNegativeFloat | None = None
    """Weight of each layer's mean squared log-sum-exp of the router's logits. None: no such loss."""


class RecomputeConfig(Concern):
    """What is computed again in the backward pass, to save memory."""

    panel = "Recomputation"

    recompute_granularity: Literal["none", "selective", "full"] = "none"
    """What to recompute: `selective` the `recompute_modules` of each layer, `full` whole layers (Megatron-SWIFT's default is selective)."""
    recompute_method: Literal["uniform", "block"] | None = None
    """With `full`: all layers in groups of `recompute_num_layers`, or only the first `recompute_num_layers`. Default: uniform."""
    recompute_num_layers: PositiveInt | None = None
    """With `full`: layers of a group (uniform), or layers to recompute (block). Default: 1 for uniform."""
    recompute_modules: list[Literal["core_attn", "mlp", "layernorm", "moe", "moe_act"]] | None = None
    """With `selective`: parts of a layer: core_attn, mlp (of dense layers), layernorm, moe (routers and experts), moe_act (the experts'
    activation). Default: core_attn."""
    vit_gradient_checkpointing: bool = True
    """Recompute the layers of the vision tower in the backward pass."""


class CheckpointConfig(Concern):
    """What is saved, where, and where to go on from."""

    panel = "Checkpoints"

    output_dir: PathText | None = None
    """Folder for all that the run writes. Default: swiftcp_output/ and the model folder's name."""
    save_steps: PositiveInt = 500
    """Optimizer steps between two checkpoints; training always ends with one."""
    save_total_limit: PositiveInt | None = None
    """Checkpoints to keep, the newest ones; the one that `checkpoints/best` names stays too. None: all."""
    async_save: bool = False
    """Write checkpoints beside the training. A copy of what is saved then stays in host memory until it is written."""
    no_save_optim: bool = False
    """Leave the optimizer's state out of checkpoints: they are a third of the size or less, and no run goes on from them exactly."""
    save_safetensors: bool = True
    """Write the last weights as a Hugging Face folder, output_dir/hf."""
    resume: PathText = "auto"
    """`auto`: go on from the newest complete checkpoint in `output_dir`, if any; `never`: refuse one that holds any; or a checkpoint."""
    resume_strict: bool = False
    """A damaged checkpoint is an error. False: it is named in a warning, and the newest one that is whole is used."""
    no_load_optim: bool = False
    """Go on from a checkpoint's weights, schedule and position with an optimizer whose moments begin anew."""


class LoggingConfig(Concern):
    """What is logged and evaluated, and how often."""

    panel = "Logging and evaluation"

    logging_steps: PositiveInt = 1
    """Optimizer steps between two lines of the log (Megatron-SWIFT's default is 5)."""
    report_to: list[Literal["tensorboard", "none"]] | None = None
    """Where the log goes beside logging.jsonl: `tensorboard` writes output_dir/runs. Default: tensorboard, where it is installed."""
    eval_steps: PositiveInt | None = None
    """Optimizer steps between two evaluations. Default: `save_steps`."""
    eval_iters: int = Field(-1, ge=-1)
    """Global batches of an evaluation; -1: all rows; 0: no evaluation."""


class RuntimeConfig(Concern):
    """The machine."""

    panel = "Runtime"

    seed: NonNegativeInt = 42
    """Seed of all that is random: the order of rows, a split of the data, random weights."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """`auto` is cuda where a GPU is found, else cpu."""
    nproc_per_node: PositiveInt | None = None
    """Ranks on this machine. Default: every GPU, or on a CPU tp x pp x cp, multiplied up until pp x ep x etp divides it."""


class ModeConfig(Concern):
    """What of a row is labelled."""

    panel = "Data"

    mode: TrainingMode = "sft"
    """`sft`: rows through the chat template, assistant turns labelled; `pt`: text without a template, all of it labelled."""


class LogprobsOutputConfig(Concern):
    """Where log-probabilities go."""

    panel = "Output"

    output: PathText
    """File for one JSON object a row: row, input_ids, labels, logprobs."""


class TrainConfig(
    ModelConfig,
    AdapterConfig,
    TunerConfig,
    FreezeConfig,
    DataConfig,
    ValidationDataConfig,
    PackingConfig,
    MediaConfig,
    TrainingConfig,
    OptimizerConfig,
    ParallelConfig,
    RouterConfig,
    RouterLossConfig,
    RecomputeConfig,
    CheckpointConfig,
    LoggingConfig,
    RuntimeConfig,
):
    """`swiftcp sft` and `swiftcp pt`."""


class LogprobsConfig(
    ModelConfig,
    AdapterConfig,
    DataConfig,
    ModeConfig,
    LogprobsOutputConfig,
    PackingConfig,
    MediaConfig,
    ParallelConfig,
    RouterConfig,
    RuntimeConfig,
):
    """`swiftcp logprobs`."""


class ParityConfig(
    ModelConfig, AdapterConfig, DataConfig, ModeConfig, PackingConfig, MediaConfig, ParallelConfig, RouterConfig, RuntimeConfig
):
    """`swiftcp parity`."""
