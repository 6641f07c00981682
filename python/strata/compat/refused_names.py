"""The names of DeepSpeed that Strata does not offer: {path below ``deepspeed``: {name: Refusal}}."""

from .refusal import Refusal

_PIPELINE = Refusal("pipeline parallelism")
_TENSOR = Refusal("tensor parallelism", "Set tensor_parallel.autotp_size to 1, or leave the section out.")
_SEQUENCE = Refusal("sequence parallelism (Ulysses)", "Set the size of sequence parallelism to 1.")
_INFERENCE = Refusal("an inference engine", "Generate with the model itself: engine.module.generate(...).")
_COMPRESSION = Refusal("compression of models")
_EXPERTS = Refusal("layers of experts and expert parallelism", "Experts of the model itself train like other modules.")
_KERNELS = Refusal("kernels of transformer layers", "Use the attention implementations of torch and transformers.")
_BUILDERS = Refusal("DeepSpeed's own operators", "Strata has its own; `strata bench-io` measures drives.")
_TILING = Refusal("tiled layers", "Set strata.tiles.max_gather, which has large parameters used in tiles; "
                  "strata.nn.linear_cross_entropy is a loss without all logits.")
_PROFILER = Refusal("a profiler of operations apart from the engine",
                    "Set flops_profiler.enabled in the configuration, or use torch.profiler.")
_ELASTIC = Refusal("elastic batch sizes", "Checkpoints load at any number of ranks; set the batch sizes yourself.")
_ESTIMATE = Refusal("estimates by formula", "strata.memory_forecast(...) and `strata plan` say it in bytes.")
_MONITOR = Refusal("writers of metrics apart from the engine",
                   "Name them in the configuration; engine.monitor.write_events(...) writes.")
_TUNING = Refusal("autotuning")
_MICS = Refusal("a context of MiCS of its own", "Use zero.Init, and zero_optimization.mics_shard_size.")
_LAMB = Refusal("the optimizer LAMB", "Use an optimizer of torch, or another library's; it runs on the shards.")
_ONEBIT = Refusal("optimizers that compress what travels", "Use AdamW.")
_HYBRID = Refusal("the hybrid engine", "Generate with the model itself: engine.module.generate(...).")
_CURRICULUM = Refusal("curriculum learning and data sampling")
_MODEL_PARALLEL = Refusal("model parallelism's random numbers", "Use torch's random numbers.")
_UNIVERSAL = Refusal("the universal format", "Strata's checkpoints load at any number of ranks without conversion.")


def _all(refusal, names):
    return dict.fromkeys(names.split(), refusal)


_PIPE = _all(_PIPELINE, "LayerSpec PipelineModule ProcessTopology TiedLayerSpec")

REFUSED = {
    "": {
        **_all(_INFERENCE, "DeepSpeedInferenceConfig InferenceEngine default_inference_config init_inference"),
        **_all(_PIPELINE, "PipelineEngine PipelineModule"),
        **_all(_TENSOR, "replace_transformer_layer set_autotp_mode tp_model_init"),
        **_all(_KERNELS, "DeepSpeedTransformerConfig DeepSpeedTransformerLayer"),
        **_all(_HYBRID, "DeepSpeedHybridEngine"),
    },
    "autotuning": _all(_TUNING, "Autotuner"),
    "checkpoint": _all(_UNIVERSAL, "DeepSpeedCheckpoint ds_to_universal"),
    "checkpoint.ds_to_universal": _all(_UNIVERSAL, "main"),
    "compression": _all(_COMPRESSION, "init_compression redundancy_clean"),
    "compression.compress": _all(_COMPRESSION, "init_compression redundancy_clean student_initialization"),
    "elasticity": _all(_ELASTIC, "compute_elastic_config elasticity_enabled ensure_immutable_elastic_config"),
    "inference": _all(_INFERENCE, "InferenceEngine RaggedInferenceEngineConfig build_hf_engine"),
    "inference.config": _all(_INFERENCE, "DeepSpeedInferenceConfig"),
    "inference.engine": _all(_INFERENCE, "InferenceEngine"),
    "module_inject": _all(_TENSOR, "replace_module replace_transformer_layer set_autotp_mode"),
    "module_inject.layers": _all(_TENSOR, "GatherReplacedLayerParams LinearAllreduce LinearLayer"),
    "moe": _all(_EXPERTS, "MoE"),
    "moe.layer": _all(_EXPERTS, "MoE"),
    "moe.experts": _all(_EXPERTS, "Experts"),
    "moe.sharded_moe": _all(_EXPERTS, "MOELayer TopKGate"),
    "monitor": {},
    "monitor.monitor": _all(_MONITOR, "MonitorMaster"),
    "ops.adam": _all(_ONEBIT, "ZenFlowCPUAdam ZenFlowSelectiveAdamW"),
    "ops.lamb": _all(_LAMB, "FusedLamb"),
    "ops.op_builder": _all(_BUILDERS, "GDSBuilder OpBuilder"),
    "ops.sparse_attention": _all(_KERNELS, "BSLongformerSparsityConfig BigBirdSparsityConfig DenseSparsityConfig "
                                 "FixedSparsityConfig SparseAttentionUtils SparseSelfAttention VariableSparsityConfig"),
    "ops.transformer": _all(_KERNELS, "DeepSpeedTransformerConfig DeepSpeedTransformerLayer"),
    "pipe": _PIPE,
    "profiling": {},
    "profiling.flops_profiler": _all(_PROFILER, "FlopsProfiler get_model_profile"),
    "profiling.flops_profiler.profiler": _all(_PROFILER, "FlopsProfiler get_model_profile"),
    "runtime.activation_checkpointing.checkpointing": _all(
        _MODEL_PARALLEL, "get_cuda_rng_tracker get_rng_tracker model_parallel_cuda_manual_seed "
        "model_parallel_reconfigure_tp_seed"),
    "runtime.data_pipeline": _all(_CURRICULUM, "CurriculumScheduler"),
    "runtime.fp16.onebit": _all(_ONEBIT, "OnebitAdam OnebitLamb ZeroOneAdam"),
    "runtime.hybrid_engine": _all(_HYBRID, "DeepSpeedHybridEngine"),
    "runtime.pipe": _PIPE,
    "runtime.pipe.engine": _all(_PIPELINE, "PipelineEngine"),
    "runtime.pipe.module": _PIPE,
    "runtime.pipe.topology": _all(_PIPELINE, "PipeModelDataParallelTopology PipelineParallelGrid ProcessTopology"),
    "runtime.sequence_parallel": {},
    "runtime.sequence_parallel.ulysses_sp": {
        **_all(_SEQUENCE, "UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter"),
        **_all(_TILING, "SequenceTiledCompute TiledFusedLogitsLoss TiledMLP"),
    },
    "runtime.tensor_parallel": _all(_TENSOR, "TpTrainingManager"),
    "runtime.zero": {
        **_all(_TILING, "TiledLinear TiledLinearReturnBias"),
        **_all(_MICS, "MiCS_Init"),
    },
    "runtime.zero.mics": _all(_MICS, "MiCS_Init MiCS_Optimizer"),
    "runtime.zero.stage3": _all(_ESTIMATE, "estimate_zero3_model_states_mem_needs_all_cold "
                                "estimate_zero3_model_states_mem_needs_all_live"),
    "runtime.zero.stage_1_and_2": _all(_ESTIMATE, "estimate_zero2_model_states_mem_needs_all_cold "
                                       "estimate_zero2_model_states_mem_needs_all_live"),
    "runtime.zero.tiling": _all(_TILING, "TiledLinear TiledLinearReturnBias"),
    "sequence": {},
    "sequence.layer": _all(_SEQUENCE, "DistributedAttention"),
}

# Methods of the engine.
REFUSED_METHODS = {
    "load_moe_state_dict": _EXPERTS,
    "random_ltd_initialize": Refusal("random layerwise token dropping"),
    "register_compile_pass": Refusal("passes of DeepCompile", "Use torch.compile: engine.compile(backend=...)."),
    "set_custom_curriculum_learning_schedule": _CURRICULUM,
}
