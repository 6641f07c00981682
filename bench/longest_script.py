"""A Trainer script with a JSON of DeepSpeed's, which trains rows of --length random tokens; longest.py starts it.

    strata run --num_gpus 1 bench/longest_script.py FOLDER OUT --deepspeed JSON --length 65536
    torchrun --nproc-per-node 1 bench/longest_script.py FOLDER OUT --deepspeed JSON --length 65536 --pieces

FOLDER has a config.json. The weights are random: each engine draws them on the device from the same seed. With
--pieces the script does for DeepSpeed what ArcticTraining does: TiledMLP takes the MLPs' place, TiledFusedLogitsLoss
that of head and loss, and DeepSpeed's own context moves inputs of checkpoints to the host.

Every rank writes a line of JSON after each step, and one where a step ends with an error; rank 0 writes what Trainer
logs. --window N replaces attention by torch's flash kernel with a window of N tokens: the kernel keeps what it keeps
without a window, and its time grows no more with the square of the row.
"""

import argparse
import contextlib
import math
import os
import time
import traceback
import types

import torch
from device_memory import DeviceSampler
from story_rank import began, tell
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.modeling_outputs import CausalLMOutputWithPast

RANK = int(os.environ.get("RANK", "0"))
GIB = 1 << 30
SAMPLE_S = 0.02
# Words, in lower case, of errors of torch, the system and Strata where the host has no memory left.
OF_HOST = ("defaultcpuallocator", "cannot allocate memory", "no memory for a buffer of the", "cannot map memory",
           "of host memory", "let this process pin", "the host does not suffice")  # fmt: skip


class Tokens(torch.utils.data.Dataset):
    """Rows of random tokens, the same for every engine, made when they are read."""

    def __init__(self, length, vocabulary, positions):
        self._length, self._vocabulary, self._positions = length, vocabulary, positions

    def __len__(self):
        return 64

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(self._vocabulary, (self._length,), generator=generator)
        row = {"input_ids": ids, "labels": ids}
        return row | ({"position_ids": torch.arange(self._length)} if self._positions else {})


class Watch(TrainerCallback):
    """Writes the lines.

    Args:
        device: torch.device.
        fail_above: a step of longer rows ends as if the device had no memory left; 0: no step does.
    """

    def __init__(self, device, length, fail_above):
        self._cuda, self._fails = device.type == "cuda", fail_above and length > fail_above
        self._device, self._sampler = device, DeviceSampler(device, SAMPLE_S)
        self._sampler.start()

    def on_train_begin(self, args, state, control, **_):
        tell({"rank": RANK, "ready": self._now() - began()})

    def on_step_begin(self, args, state, control, **_):
        self._began = self._now()
        if self._fails:
            raise torch.OutOfMemoryError("simulated: no memory for rows of this length")

    def on_step_end(self, args, state, control, **_):
        line = {"rank": RANK, "step": state.global_step, "seconds": self._now() - self._began}
        if self._cuda:
            line |= {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        tell(line | {"device": self._sampler.take()})

    def on_log(self, args, state, control, logs=None, **_):
        if RANK == 0 and "loss" in logs:
            tell({"logged": state.global_step, "loss": logs["loss"], "grad_norm": logs["grad_norm"]})

    def _now(self):
        if self._cuda:
            torch.cuda.synchronize(self._device)
        return time.time()


class TrainerWithInputsOnTheHost(Trainer):
    """Moves the inputs of checkpoints by DeepSpeed's context, whose copies run beside the computation."""

    def training_step(self, *args, **kwargs):
        with self.inputs_on_the_host:
            return super().training_step(*args, **kwargs)

    @property
    def inputs_on_the_host(self):
        from deepspeed.runtime.activation_checkpointing import offload_activations

        if not hasattr(self, "_inputs_on_the_host"):  # one of all steps, since it keeps its pinned memory
            self._inputs_on_the_host = offload_activations.get_checkpoint_hidden_states_offloading_ctx_manager()
        return self._inputs_on_the_host


def train_in_tiles(model):
    """Tiles of MLPs and of the loss, in ArcticTraining's sizes: of an MLP as many tokens as its input is wide, of the
    logits 1 GiB in fp32."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss, TiledMLP

    def mlp(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    def tiled_mlp(self, x):
        weights = [self.down_proj.weight, self.gate_proj.weight, self.up_proj.weight]
        return TiledMLP.apply(mlp, self, x, math.ceil(x.shape[-2] / x.shape[-1]), weights)

    def forward(self, input_ids=None, position_ids=None, labels=None, shift_labels=None, num_items_in_batch=None,
                **rest):  # fmt: skip
        hidden = self.model(input_ids=input_ids, position_ids=position_ids, **rest).last_hidden_state
        if shift_labels is None:
            shift_labels = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
        count = (shift_labels != -100).sum() if num_items_in_batch is None else num_items_in_batch

        weight, tied = self.lm_head.weight, self.config.tie_word_embeddings

        def loss_of(self, hidden, labels):  # divides here: gradients of the head are made before the sum is divided
            if tied:  # DeepSpeed would reduce the gradient after the last tile, and again after the embedding's
                weight.ds_grad_is_ready = False
            logits = self.lm_head(hidden).float()
            return torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / count

        shards = math.ceil(4 * shift_labels.numel() * self.config.vocab_size / GIB)
        loss = TiledFusedLogitsLoss.apply(loss_of, self, hidden, shift_labels, None, shards, [weight], "sum")
        weight.ds_grad_is_ready = True
        return CausalLMOutputWithPast(loss=loss)

    type(model.model.layers[0].mlp).forward = tiled_mlp
    model.forward = types.MethodType(forward, model)


def attend_within(window):
    """Replaces torch's attention on GPUs by its flash kernel with a window."""
    from torch.nn.attention.varlen import varlen_attn

    def attention(query, key, value, *args, **kwargs):
        rows, _, tokens, _ = query.shape
        ends = torch.arange(0, (rows + 1) * tokens, tokens, dtype=torch.int32, device=query.device)
        flat = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
        found = varlen_attn(*flat, ends, ends, tokens, tokens, scale=kwargs.get("scale"), window_size=(window - 1, 0))
        return found.unflatten(0, (rows, tokens)).transpose(1, 2)

    torch.nn.functional.scaled_dot_product_attention = attention


def training_arguments(a):
    parallel = {}
    if a.sp > 1:
        from accelerate import ParallelismConfig
        from accelerate.utils import DeepSpeedSequenceParallelConfig

        parallel["parallelism_config"] = ParallelismConfig(
            sp_backend="deepspeed", sp_size=a.sp, dp_shard_size=int(os.environ["WORLD_SIZE"]) // a.sp,
            sp_handler=DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa"),
        )  # fmt: skip
    return TrainingArguments(
        output_dir=a.out, deepspeed=a.deepspeed, max_steps=a.steps, per_device_train_batch_size=1,
        gradient_accumulation_steps=1, learning_rate=1e-5, max_grad_norm=1.0, bf16=True, gradient_checkpointing=True,
        logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=a.cpu,
        dataloader_pin_memory=not a.cpu, lr_scheduler_type="constant", **parallel,
    )  # fmt: skip


def make_trainer(a, device):
    args = training_arguments(a)  # before the model: transformers shards it at stage 3 while it is built
    set_seed(1)
    with contextlib.nullcontext() if a.stage == 3 else device:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(a.folder), dtype=torch.bfloat16)
    model.config.use_cache = False
    if a.pieces:
        train_in_tiles(model)
    trainer = TrainerWithInputsOnTheHost if a.pieces else Trainer
    data = Tokens(a.length, model.config.vocab_size, a.positions)
    return trainer(model=model, args=args, train_dataset=data, callbacks=[Watch(device, a.length, a.fail_above)])


def end_first():
    """If the host has no memory left, the kernel ends this process before others."""
    with open("/proc/self/oom_score_adj", "w", encoding="utf-8") as file:
        file.write("1000")


def kind_of(error):
    """"device", "host", the memory that an error says has no room, or "error"."""
    text = f"{type(error).__name__}: {error}".lower()
    if isinstance(error, MemoryError) or "device cuda" not in text and any(words in text for words in OF_HOST):
        return "host"
    if not any(words in text for words in ("outofmemory", "out of memory", "cublas_status_alloc_failed")):
        return "error"
    callers = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
    pins = callers & {"pin_memory", "pack_to_cpu", "_empty_cpu_like"}  # CUDA says of these what it says of a device
    return "host" if pins and not isinstance(error, torch.OutOfMemoryError) else "device"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("out")
    parser.add_argument("--deepspeed")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--sp", type=int, default=1)
    parser.add_argument("--pieces", action="store_true")
    parser.add_argument("--positions", action="store_true", help="rows with position_ids")
    parser.add_argument("--window", type=int, default=0)
    parser.add_argument("--fail-above", type=int, default=0)
    parser.add_argument("--cpu", action="store_true")
    a = parser.parse_args()
    end_first()
    device = torch.device("cpu")
    if a.cpu:  # Accelerate leaves ranks without accelerators unconnected
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo")
    else:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        if a.window:
            attend_within(a.window)
    try:
        make_trainer(a, device).train()
    except Exception as error:
        said = str(error).strip().splitlines() or [""]
        tell({"rank": RANK, "ended": kind_of(error), "message": f"{type(error).__name__}: {said[0]}"[:400]})
        raise


main()
