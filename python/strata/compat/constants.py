"""Constants of DeepSpeed that scripts import: {path below ``deepspeed``: {name: value}}."""

_SCHEDULES = {
    "LR_RANGE_TEST": "LRRangeTest",
    "ONE_CYCLE": "OneCycle",
    "WARMUP_LR": "WarmupLR",
    "WARMUP_DECAY_LR": "WarmupDecayLR",
    "WARMUP_COSINE_LR": "WarmupCosineLR",
}
_OF_SCHEDULES = (
    "LR_SCHEDULE LR_RANGE_TEST_MIN_LR LR_RANGE_TEST_STEP_RATE LR_RANGE_TEST_STEP_SIZE LR_RANGE_TEST_STAIRCASE "
    "EDGE_VALUE MID_VALUE CYCLE_FIRST_STEP_SIZE CYCLE_FIRST_STAIR_COUNT CYCLE_SECOND_STEP_SIZE "
    "CYCLE_SECOND_STAIR_COUNT DECAY_STEP_SIZE CYCLE_MIN_LR CYCLE_MAX_LR DECAY_LR_RATE CYCLE_MIN_MOM CYCLE_MAX_MOM "
    "DECAY_MOM_RATE WARMUP_MIN_LR WARMUP_MAX_LR WARMUP_NUM_STEPS WARMUP_TYPE WARMUP_MIN_RATIO COS_MIN_RATIO "
    "TOTAL_NUM_STEPS"
).split()
_OPTIMIZERS = {f"{name}_OPTIMIZER": name.lower() for name in "ADAGRAD ADAM ADAMW LAMB LION MUON".split()}
LEAVES = [
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
]

CONSTANTS = {
    "runtime.config": {**_OPTIMIZERS, "DEEPSPEED_OPTIMIZERS": list(_OPTIMIZERS.values())},
    "runtime.constants": {
        "GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps",
        "GRADIENT_CLIPPING": "gradient_clipping",
        "GRADIENT_CLIPPING_DEFAULT": 1.0,
        "LOG_LEVEL": "log_level",
        "LOG_LEVEL_DEFAULT": None,
        "ROUTE_EVAL": "eval",
        "ROUTE_PREDICT": "predict",
        "ROUTE_TRAIN": "train",
        "TRAIN_BATCH_SIZE": "train_batch_size",
        "TRAIN_MICRO_BATCH_SIZE_PER_GPU": "train_micro_batch_size_per_gpu",
    },
    "runtime.lr_schedules": {
        **_SCHEDULES,
        **{name: name.lower() for name in _OF_SCHEDULES},
        "WARMUP_LOG_RATE": "log",
        "WARMUP_LINEAR_RATE": "linear",
        "VALID_LR_SCHEDULES": list(_SCHEDULES.values()),
    },
    "runtime.swap_tensor": {"MIN_SWAPPABLE_BYTES": 1024 * 1024},
    "runtime.zero.leaf_module_config": {
        "DEFAULT_LEAF_MODULE_CLASSES": LEAVES,
        "DEFAULT_LEAF_MODULE_NAMES": [],
        "DEFAULT_LEAF_MODULE_NAME_SUFFIXES": [],
    },
}
