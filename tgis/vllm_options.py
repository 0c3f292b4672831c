"""vLLM's options that are not among our own: which mean nothing here, and which the server cannot do without.

Those with a counterpart are `vllm_names` in `tgis.config`. All are flags everywhere, and variables in
vllm-tgis-adapter's entry point only: elsewhere HOST, MODEL or SEED is too common a name to be meant for us.
"""

from dataclasses import replace

from tgis.utils.options import ANY, Option, only

DEFAULTS = {"port": "8000", "default_max_new_tokens": "context"}  # of vllm-tgis-adapter, by our names


def as_in_adapter(opt: Option) -> Option:
    """The option as the adapter has it: vLLM's names are variables too, and the default is the adapter's."""
    flags_only = tuple(name for name in opt.vllm_names if name.startswith("no_"))
    variables = tuple(name for name in opt.vllm_names if name not in flags_only)
    opt = replace(opt, aliases=(*opt.aliases, *variables), vllm_names=flags_only)
    default = DEFAULTS.get(opt.name)
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
IGNORED = _options(f"""{_SWITCHES} {_NEGATED_SWITCHES}
    additional_config all2all_backend allowed_headers allowed_local_media_path allowed_media_domains allowed_methods
    allowed_origins api_key api_server_count block_size chat_template chat_template_content_format code_revision
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
