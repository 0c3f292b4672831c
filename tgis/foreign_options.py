"""Options of TGIS, vllm-tgis-adapter and vLLM that the server has not: known, so that command lines and manifests work.

Options of vLLM with a counterpart are `vllm_names` in `tgis.config`. vLLM's names are flags everywhere, but variables
in the adapter's entry point only: elsewhere HOST, MODEL or SEED is too common a name to be meant for us.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tgis.utils.options import ANY, BOOLEAN, TEXT, Option, Words, find_raw_values, only, parse_option

WITHOUT_EFFECT = (  # options that ask for something that is not there; the text says what happens instead
    Option(TEXT, "quantize", vllm_names=("quantization",), short="-q", help_text="the weights are served as they are"),
    Option(BOOLEAN, "trust_remote_code", help_text="the code of a model is never run, only classes of transformers"),
    Option(TEXT, "speculator_name", help_text="there is no speculation"),
    Option(TEXT, "otlp_endpoint", help_text="no traces are sent"),
)
OFF = ("false", "0", "none")  # values of these options that ask for nothing
IGNORED = tuple(
    Option(ANY, name)
    for name in (
        # of TGIS's launcher and router
        *("shard_uds_path", "master_addr", "master_port", "max_batch_weight", "max_prefill_weight"),
        *("otlp_service_name", "otel_service_name"),
        # of TGIS's model server
        *("rank", "world_size", "debug", "cuda_pad_to_mult_of_8", "compact_before_prefill", "fp32_logits_process"),
        *("estimate_memory_batch_size", "estimate_memory_min_samples", "estimate_memory_start_seq_len"),
        *("estimate_memory_stop_seq_len", "estimate_memory_fit_threshold", "estimate_memory_new_tokens"),
        *("estimate_memory_new_token_samples", "kv_cache_manager_num_gpu_blocks", "log_gpu_usage_interval"),
        *("disable_exllama", "exllama_version", "gptq_cuda_type", "disable_custom_kernels", "bloom_slow_but_exact"),
        *("transformers_attn_impl", "merge_onnx_graphs", "optimize_onnx_model", "speculator_revision"),
        *("speculator_n_candidates", "speculator_top_k_tokens_per_head", "speculator_max_batch_size"),
        # of TGI
        *("max_batch_total_tokens", "waiting_served_ratio", "prometheus_port"),
        # of vllm-tgis-adapter
        *("enable_vllm_log_requests", "disable_prompt_logprobs"),
    )
)

ADAPTER_DEFAULTS = {"port": "8000", "default_max_new_tokens": "context"}  # by our names


_FLAGS_ONLY = ("config", "hostname")  # every container sets the variable HOSTNAME


def as_declared(argument: str) -> str:
    """A flag as the parser knows it: vLLM also takes --max_model_len, --compilation-config.level=3 and -O3."""
    if argument.startswith("-O"):
        return f"--optimization-level={argument[2:]}"
    name, equals, value = argument.partition("=")
    return name.partition(".")[0].replace("_", "-") + equals + value if name.startswith("--") else argument


def as_in_adapter(opt: Option) -> Option:
    """The option as the adapter has it: vLLM's names are variables too, and the default is the adapter's."""
    flags_only = tuple(name for name in opt.vllm_names if name.startswith("no_") or name in _FLAGS_ONLY)
    variables = tuple(name for name in opt.vllm_names if name not in flags_only)
    opt = replace(opt, aliases=(*opt.aliases, *variables), vllm_names=flags_only)
    default = ADAPTER_DEFAULTS.get(opt.name)
    if default is None:
        return opt
    return replace(opt, shown_default=default, default_factory=lambda _environ: opt.value_type.parse(default))


def _options(names: str) -> tuple[Option, ...]:
    return tuple(Option(ANY, vllm_names=(name,)) for name in names.split())


ALWAYS_ON = _options("enable_lora enable_chunked_prefill no_trust_remote_code no_disable_log_requests")

_GENERATION_ONLY = "only text generation is supported"
_OTHER_MODEL = "a model is served as its directory describes it"
REFUSED = (  # ignoring these would serve something else than was asked for
    Option(only("the options must be flags or variables"), vllm_names=("config",)),
    Option(only(_GENERATION_ONLY, "auto", "generate"), vllm_names=("task", "runner")),
    Option(only(_GENERATION_ONLY, "auto", "none"), vllm_names=("convert",)),
    Option(only("the tokenizer must be in the model's directory"), vllm_names=("tokenizer",)),
    Option(only(_OTHER_MODEL, "{}"), vllm_names=("hf_config_path", "hf_overrides", "rope_scaling", "rope_theta")),
    Option(only("no code is loaded"), vllm_names=("logits_processors",)),
    Option(
        only("a model is split by --tensor-parallel-size only", "1"), vllm_names=("pipeline_parallel_size", "nnodes")
    ),
)

_SWITCHES = """
    aggregate_engine_logging allow_credentials async_scheduling calculate_kv_scales disable_async_output_proc
    disable_cascade_attn disable_chunked_mm_input disable_custom_all_reduce disable_fastapi_docs
    disable_frontend_multiprocessing disable_hybrid_kv_cache_manager disable_log_stats
    disable_logprobs_during_spec_decoding disable_mm_preprocessor_cache disable_nccl_for_dp_synchronization
    disable_sliding_window
    disable_uvicorn_access_log enable_auto_tool_choice enable_dbo enable_eplb enable_expert_parallel
    enable_force_include_usage enable_log_outputs enable_lora_bias enable_mm_embeds
    enable_multimodal_encoder_data_parallel enable_prompt_adapter enable_prompt_embeds enable_prompt_tokens_details
    enable_reasoning enable_request_id_headers enable_server_load_tracking enable_sleep_mode enable_ssl_refresh
    enable_tokenizer_info_endpoint enforce_eager exclude_tools_when_tool_choice_none fully_sharded_loras headless
    interleave_mm_strings kv_cache_metrics kv_sharing_fast_prefill log_error_stack multi_step_stream_outputs
    ray_workers_use_nsight return_tokens_as_token_ids skip_mm_profiling skip_tokenizer_init tokens_only
    trust_request_chat_template use_tqdm_on_load use_v2_block_manager worker_use_ray engine_use_ray
    data_parallel_external_lb data_parallel_hybrid_lb"""
_NEGATED_SWITCHES = " ".join(f"no_{name}" for name in (*_SWITCHES.split(), "enable_lora", "enable_chunked_prefill"))
VLLM_IGNORED = _options(f"""{_SWITCHES} {_NEGATED_SWITCHES}
    additional_config all2all_backend allowed_headers allowed_local_media_path allowed_media_domains allowed_methods
    allowed_origins api_server_count block_size chat_template chat_template_content_format code_revision
    collect_detailed_traces compilation_config config_format cp_kv_cache_interleave_size cpu_offload_gb
    cuda_graph_sizes cudagraph_capture_sizes data_parallel_address data_parallel_backend data_parallel_rank
    data_parallel_rpc_port data_parallel_size data_parallel_size_local data_parallel_start_rank
    dbo_decode_token_threshold dbo_prefill_token_threshold dcp_kv_cache_interleave_size decode_context_parallel_size
    default_mm_loras device distributed_executor_backend ec_transfer_config eplb_config expert_placement_strategy
    generation_config guided_decoding_backend h11_max_header_count h11_max_incomplete_event_size hf_token
    ignore_patterns io_processor_plugin kv_cache_dtype kv_cache_memory_bytes kv_cache_metrics_sample
    kv_events_config kv_offloading_backend kv_offloading_size kv_transfer_config limit_mm_per_prompt load_format
    log_config_file logits_processor_pattern logprobs_mode long_lora_scaling_factors long_prefill_token_threshold
    lora_dtype lora_extra_vocab_size mamba_block_size mamba_cache_dtype mamba_ssm_cache_dtype max_cpu_loras
    max_cudagraph_capture_size max_log_len max_long_partial_prefills max_lora_rank max_loras
    max_num_partial_prefills max_parallel_loading_workers max_prompt_adapter_token max_prompt_adapters
    max_seq_len_to_capture media_io_kwargs middleware mm_encoder_attn_backend mm_encoder_tp_mode
    mm_processor_cache_gb mm_processor_cache_type mm_processor_kwargs mm_shm_cache_max_object_size_mb model_impl
    model_loader_extra_config ngram_prompt_lookup_max ngram_prompt_lookup_min node_rank num_gpu_blocks_override
    num_lookahead_slots num_scheduler_steps num_speculative_tokens optimization_level otlp_traces_endpoint
    override_attention_dtype override_generation_config override_pooler_config pooler_config preemption_mode
    prefill_context_parallel_size prefix_caching_hash_algo prompt_adapters pt_load_map_location
    quantization_param_path reasoning_parser reasoning_parser_plugin response_role root_path
    safetensors_load_strategy scheduler_cls scheduler_delay_factor scheduling_policy
    show_hidden_metrics_for_version speculative_config speculative_draft_tensor_parallel_size speculative_model
    ssl_cert_reqs stream_interval structured_outputs_config swap_space tokenizer_mode tokenizer_pool_extra_config
    tokenizer_pool_size tokenizer_pool_type tokenizer_revision tool_call_parser tool_parser_plugin tool_server
    typical_acceptance_sampler_posterior_alpha typical_acceptance_sampler_posterior_threshold uds uvicorn_log_level
    video_pruning_rate worker_cls worker_extension_cls""")


@dataclass(frozen=True, slots=True)
class ForeignOptions:
    """Those that an entry point knows, by what is done with them."""

    ignored_prefix: str | None  # of variables
    without_effect: tuple[Option, ...]
    ignored: tuple[Option, ...]
    refused: tuple[Option, ...]
    always_on: tuple[Option, ...]

    @classmethod
    def known(cls, *, as_adapter: bool) -> "ForeignOptions":
        """Those of `tgis serve`, or of `python -m vllm_tgis_adapter`."""
        tables = WITHOUT_EFFECT, (*IGNORED, *VLLM_IGNORED), REFUSED, ALWAYS_ON
        if as_adapter:
            return cls("VLLM_", *(tuple(map(as_in_adapter, table)) for table in tables))
        return cls(None, *tables)

    @property
    def all(self) -> tuple[Option, ...]:
        """Every one of them."""
        return (*self.without_effect, *self.ignored, *self.refused, *self.always_on)

    def refuse(self, flags: Mapping[str, Words], environ: Mapping[str, str], *, unless: str) -> None:
        """OptionError for what would serve something else; the value `unless` asks for nothing."""
        for opt in self.refused:
            for raw in find_raw_values(opt, flags, environ):
                if raw.text != unless:
                    parse_option(opt, [raw])

    def warnings(self, flags: Mapping[str, Words], environ: Mapping[str, str]) -> list[str]:
        """About those that are set."""
        warnings = []
        for opt in self.without_effect:
            if found := find_raw_values(opt, flags, environ):
                parse_option(opt, found)
                warnings += [f"{raw} has no effect: {opt.help_text}" for raw in found if raw.text.lower() not in OFF]
        ignored = [raw.source for opt in self.ignored for raw in find_raw_values(opt, flags, environ)]
        if self.ignored_prefix is not None:
            ignored += [name for name in environ if name.startswith(self.ignored_prefix)]
        return [*warnings, f"ignored options: {', '.join(ignored)}"] if ignored else warnings
