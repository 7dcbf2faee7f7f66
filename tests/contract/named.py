"""Names of the contract whose case is another test, and names that wait for their first user."""

from __future__ import annotations

from collections.abc import Mapping

from headstock.spi import Variant

_CLAIMS = "tests/core/selection/test_capabilities.py::"
_REFUSALS = "tests/core/selection/test_refusals.py::"
_TUNED = "tests/core/startup/test_tuned_choices.py::"
_GROUPS = "tests/core/startup/test_kv_groups.py::"
_BROKEN = "tests/core/registry/test_broken.py::"
_PLUGINS = "tests/core/cli/test_plugins.py::"
_FLASH, _FLASHINFER = (
    f"tests/backends/{name}/test_attention.py::" for name in ("flash_attn", "flashinfer")
)
_TABLES = "tests/core/execution/test_row_tables.py::"
_GROUPED = "tests/core/engine/test_shared_prefixes.py::"
_GRAPHS = (
    "tests/plugins/cuda_graph/test_prompt_graphs.py::"
    "test_replayed_prompts_give_the_tokens_of_eager_ones"
)
_TOOLS = "tests/plugins/tool_parsers/test_parsers.py::"
_ROUTES = "tests/core/nn/test_routing.py::"
_WRAPPERS = "tests/models/test_wrappers.py::"
_ANY_DECODER = "tests/models/test_transformers_engine.py::"
_DRAFT = "tests/plugins/test_draft_proposer.py::"
_MTP = "tests/models/test_mtp.py::"
_LAYERS = "tests/plugins/triton_ops/interpreted/layers.py::"

SHOWN: Mapping[str, str] = {
    "Model.check": _ANY_DECODER
    + "test_a_model_that_its_family_finds_wrong_is_refused_before_a_step",
    "ModelConfig.is_capturable": _ANY_DECODER
    + "test_auto_runs_without_graphs_and_a_runner_with_them_is_refused",
    "ModelConfig.capture_obstacle": "tests/models/test_transformers_replays.py::"
    "test_a_refusal_of_graphs_says_what_was_found",
    **dict.fromkeys(
        (
            "Model.draft",
            "Model.draft_config",
            "ModelConfig.draft_layers",
            "ProposerSpec.by_model",
            "Program.has_own_drafts",
            "Sample.make_drafts",
            "Sample.verified",
            "RunnerCapabilities.drafts",
            "DecodeAttention.takes_bounds",
            "RowTables.read_tokens",
        ),
        _MTP + "test_guesses_are_those_of_transformers_layers",
    ),
    **dict.fromkeys(
        (
            "DraftModel.continue_rows",
            "DraftModel.vocab",
            "ProposerContext.draft_model",
            "ProposerContext.open_model",
            "ProposerContext.vocab",
            "ProposerSpec.takes_model",
            "Proposer.start",
        ),
        _DRAFT + "test_tokens_are_the_same_with_any_second_model",
    ),
    **dict.fromkeys(
        ("DraftModel.close", "Proposer.close"),
        _DRAFT + "test_the_second_model_ends_with_the_engine_and_with_a_start_that_fails",
    ),
    **dict.fromkeys(
        (
            "Proposer.end",
            "ProposerContext.device",
            "ProposerContext.max_len",
            "ProposerContext.max_rows",
        ),
        _DRAFT + "test_a_proposer_is_told_of_the_engine_and_of_its_rows",
    ),
    "LayerConfig.has_own_values": "tests/models/test_families.py::"
    "test_log_probabilities_are_those_of_transformers",
    "ModelConfig.placeholders": _WRAPPERS + "test_a_prompt_with_the_token_of_an_image_is_refused",
    "ParamSpec.may_swap_whole": _WRAPPERS + "test_what_transformers_saves_again_is_read_alike",
    "ParamSpec.packed_rows": "tests/core/weights/test_mxfp4.py::"
    "test_experts_that_stay_packed_have_the_same_numbers",
    "ParamSpec.renames": _WRAPPERS + "test_names_of_any_release_are_read_alike",
    "ParamSpec.towers": _WRAPPERS + "test_one_line_says_that_the_tower_is_not_read",
    "PluginSpec.name": _BROKEN
    + "test_a_broken_plugin_is_named_with_its_distribution_and_its_reason",
    "PluginSpec.spi": _BROKEN + "test_a_plugin_runs_on_its_revision_and_every_later_one",
    "PluginSpec.summary": _PLUGINS + "test_inspect_shows_spec_capabilities_contract_and_options",
    "PluginSpec.implementation": _BROKEN + "test_an_implementation_is_what_the_path_names",
    "PluginSpec.requires": _BROKEN + "test_a_missing_requirement_is_found_without_importing",
    "PluginSpec.options": "tests/core/registry/test_options.py::"
    "test_an_assignment_is_converted_to_the_type_of_its_field",
    "PluginSpec.request_args": "tests/core/selection/test_request_args.py::"
    "test_each_plugin_gets_what_it_claims",
    **dict.fromkeys(
        ("PeerMemory.own", "PeerMemory.addresses"),
        "tests/plugins/triton_ops/interpreted/ranks.py::test_ranks_exchange_numbers_through_memory",
    ),
    "PeerMemory.abandoned": "tests/plugins/triton_ops/interpreted/ranks.py::"
    "test_no_kernel_waits_for_a_rank_that_has_gone",
    "AttentionSpec.capabilities": _CLAIMS + "test_each_claim_that_is_not_met_is_a_reason",
    "PluginSpec.resolve": _REFUSALS + "test_a_plugin_that_says_no_is_named_with_its_reason",
    **dict.fromkeys(
        (
            f"PartQuery.{name}"
            for name in (
                "model",
                "dtype",
                "kv_dtype",
                "formats",
                "contiguous",
                "max_rows",
                "max_batch_tokens",
                "max_seq_len",
                "parts",
            )
        ),
        _REFUSALS + "test_a_runner_is_asked_last_and_knows_the_other_parts",
    ),
    **dict.fromkeys(
        ("RunnerCapabilities.models", "RunnerCapabilities.ops"),
        _REFUSALS + "test_a_runner_states_the_models_and_operations_that_it_takes",
    ),
    "CacheSpec.capabilities": _GROUPS + "test_what_is_reused_follows_from_layouts_and_policy",
    "OpsSpec.capabilities": _GROUPS + "test_each_part_must_serve_the_layout",
    "RunnerSpec.capabilities": "tests/plugins/cuda_graph/test_replay.py::"
    "test_a_decode_backend_without_graphs_is_refused_by_name",
    "ToolParserSpec.special_tokens": "tests/plugins/tool_parsers/test_in_answers.py::"
    "test_marks_that_are_special_tokens_reach_the_parser",
    "Tool.name": _TOOLS + "test_an_answer_is_read_the_same_whole_cut_once_and_by_characters",
    "Tool.parameters": _TOOLS + "test_an_answer_is_read_the_same_whole_cut_once_and_by_characters",
    **dict.fromkeys(
        (
            *("ToolEvent.kind", "ToolEvent.text"),
            *(f"ToolEventKind.{name}" for name in ("CONTENT", "CALL", "ARGUMENTS", "END")),
        ),
        "tests/core/text/test_chat_answers.py::"
        "test_an_answer_is_divided_alike_whole_streamed_and_whatever_comes_at_once",
    ),
    **dict.fromkeys(
        (
            "GrammarKind.JSON_OR_CALLS",
            *(f"WrittenCall.{name}" for name in ("begin", "before", "after", "end", "separator")),
        ),
        "tests/plugins/llguidance/test_calls_or_answers.py::"
        "test_what_the_masks_admit_is_a_call_that_is_read_or_an_answer_of_the_schema",
    ),
    "GrammarKind.TEXT_OR_CALLS": "tests/plugins/llguidance/test_strict_calls.py::"
    "test_whatever_the_masks_admit_the_arguments_of_strict_calls_follow_their_schema",
    "CommandSpec.parser": "tests/docs/test_command_plugin.py::test_the_tab_key_knows_its_flags",
    **dict.fromkeys(
        (f"CheckpointSpec.{name}" for name in ("name", "spi", "summary", "directory")),
        _PLUGINS + "test_inspect_shows_where_a_checkpoint_is",
    ),
    "RunnerCapabilities.needs_graph": "tests/plugins/cuda_graph/test_replay.py::"
    "test_a_decode_backend_without_graphs_is_refused_by_name",
    "RunnerCapabilities.pooling": "tests/core/engine/test_pooling.py::"
    "test_a_runner_that_does_not_claim_it_is_named",
    "DeviceEnv.distributions": "tests/backends/flash_attn/test_resolve.py::"
    "test_the_first_provider_that_serves_is_used",
    "DeviceEnv.memory_bytes": _REFUSALS + "test_a_runner_is_asked_last_and_knows_the_other_parts",
    "DeviceEnv.torch": _TUNED + "test_other_software_ends_its_use_and_is_named",
    "DeviceEnv.cuda": _TUNED + "test_other_software_ends_its_use_and_is_named",
    "Rejection.code": "tests/core/cli/test_doctor.py::"
    "test_a_backend_that_cannot_run_here_is_a_warning_with_the_reason_and_the_next_move",
    "Rejection.message": _CLAIMS + "test_every_reason_is_given_at_once",
    "Rejection.hint": _CLAIMS
    + "test_a_device_that_is_not_served_is_answered_with_a_backend_that_can_be_had",
    "ModelConfig.architecture": "tests/models/test_shards.py::"
    "test_a_shard_that_does_not_divide_is_refused",
    "ModelConfig.ignored_fields": "tests/core/nn/test_config_keys.py::"
    "test_the_unread_fields_are_in_one_warning",
    "WeightFormat.kind": "tests/core/weights/test_quant_reader.py::"
    "test_any_part_of_a_packed_matrix_is_value_times_scale",
    "WeightKind.FP4_E2M1": "tests/core/weights/test_mxfp4.py::"
    "test_experts_stand_for_what_transformers_makes_of_them",
    "WeightKind.FP8_E4M3": "tests/core/weights/test_quant_reader.py::"
    "test_any_part_of_a_packed_matrix_is_value_times_scale",
    **dict.fromkeys(
        ("WeightFormat.has_zeros", "WeightKind.INT4", "WeightKind.INT8"),
        "tests/core/weights/test_published_formats.py::"
        "test_parameters_are_the_numbers_of_the_format",
    ),
    "CacheStats.pages": "tests/plugins/replay_view/test_drawings.py::"
    "test_pages_are_counted_and_drawn_as_the_state_has_them",
    "CacheStats.held": "tests/plugins/replay_view/test_drawings.py::"
    "test_pages_are_counted_and_drawn_as_the_state_has_them",
    # attention
    **dict.fromkeys(
        ("AttentionContext.kv", "KVLayer.latent"),
        "tests/backends/sdpa/test_latent.py::test_every_shape_agrees_with_attention_written_out",
    ),
    "AttentionContext.page_size": _FLASH
    + "test_a_replayed_plan_reads_the_new_step_at_the_old_addresses",
    "AttentionContext.layers": "tests/backends/trtllm/test_attention.py::"
    "test_every_phase_agrees_with_attention_written_out",
    "AttentionQuery.max_rows": _FLASHINFER
    + "test_the_workspace_grows_with_the_rows_from_what_the_option_asks_for",
    "AttentionQuery.max_seq_len": _FLASHINFER
    + "test_a_replayed_plan_reads_the_new_step_at_the_old_addresses",
    "AttentionStep.query_start": _FLASH + "test_a_captured_plan_serves_prompts_of_any_lengths",
    "AttentionStep.context_lens": _FLASH + "test_a_captured_plan_serves_prompts_of_any_lengths",
    **dict.fromkeys(
        ("LayerConfig.k_scale", "LayerConfig.v_scale", "LayerInfo.k_scale", "LayerInfo.v_scale"),
        "tests/core/weights/test_kv_scales.py::"
        "test_stored_scales_give_the_answers_of_maps_divided_by_them",
    ),
    **dict.fromkeys(
        (
            "AttentionCapabilities.planning",
            "DecodeAttention.planning",
            "GraphSupport.ALWAYS",
            "GraphSupport.DECODE",
            "Planning.NONE",
            "Planning.PER_STEP",
            "Program.prompt_attention",
        ),
        _GRAPHS,
    ),
    **dict.fromkeys(
        (
            "GraphSupport.UNIFORM",
            "Program.verify_len",
            "Program.verify_attention",
            "Step.num_drafts",
        ),
        "tests/plugins/cuda_graph/test_verify.py::"
        "test_steps_that_verify_are_replayed_whole_or_in_pieces_by_the_backend_of_prompts",
    ),
    "GraphSupport.NEVER": "tests/plugins/cuda_graph/test_replay.py::"
    "test_a_decode_backend_without_graphs_is_refused_by_name",
    "DecodeAttention.shares_prefixes": _GROUPED
    + "test_rows_are_followed_only_where_they_can_share_pages",
    **dict.fromkeys(
        ("DecodeAttention.shares_beside_prompts", "Step.groups"),
        "tests/plugins/cuda_graph/test_prefixes.py::"
        "test_rows_are_grouped_beside_prompts_in_whole_graphs_that_read_their_groups",
    ),
    **dict.fromkeys(
        (
            "ReplayLimits.max_rows",
            "ReplayLimits.max_tokens",
            "ReplayLimits.full_tokens",
            "ReplayLimits.may_defer",
            "ReplaySizes.rows",
            "ReplaySizes.tokens",
            "ReplaySizes.num_left",
        ),
        "tests/plugins/cuda_graph/test_deferred.py::test_a_runner_prepares_what_it_is_asked_for",
    ),
    "Step.num_decode": "tests/plugins/cuda_graph/test_prompt_graphs.py::"
    "test_contexts_in_larger_steps_with_decode_rows_have_a_limit",
    "Sample.is_replayed": "tests/plugins/cuda_graph/test_verify.py::"
    "test_steps_that_verify_are_replayed_whole_or_in_pieces_by_the_backend_of_prompts",
    **dict.fromkeys(
        ("Sample.order", "Step.order", "PrefixGroups.counts", "PrefixGroups.lens"),
        _GROUPED + "test_grouped_rows_make_the_tokens_of_rows_by_themselves",
    ),
    **dict.fromkeys(
        (f"PrefixInputs.{name}" for name in ("memory", "group_starts", "shared_lens")),
        _TABLES + "test_captured_steps_are_cut_at_shared_prefixes_as_others_are",
    ),
    **dict.fromkeys(
        (
            f"StepInputs.{name}"
            for name in (
                "row_ids",
                "starts",
                "query_start",
                "context_lens",
                "token_rows",
                "positions",
            )
        ),
        _TABLES + "test_prompt_inputs_are_the_step_and_padding",
    ),
    "StepInputs.query_len": _TABLES
    + "test_captured_functions_make_what_steps_of_equally_long_rows_have_without_them",
    "StepInputs.memory": _TABLES
    + "test_inputs_keep_their_addresses_and_begin_where_kernels_like_it",
    "Program.rules": "tests/core/grammar/test_rows.py::"
    "test_answers_follow_their_rules_and_others_are_as_without",
    **dict.fromkeys(
        (
            *("Processing.rows", "Processing.parts", "Sampling.processing"),
            *(f"LogitColumn.{name}" for name in ("neutral", "dtype", "width")),
        ),
        "tests/core/engine/test_processors.py::"
        "test_rows_with_a_processor_are_changed_by_it_and_others_are_as_without",
    ),
    **dict.fromkeys(
        ("LogitColumn.in_forward", "Batch.columns", "RowColumns.tables"),
        "tests/core/engine/test_request_columns.py::"
        "test_requests_of_other_values_say_what_they_say_alone",
    ),
    **dict.fromkeys(
        (
            *(f"Vocabulary.{name}" for name in ("tokenizer_file", "size", "end_ids")),
            *(f"GrammarKind.{name}" for name in ("JSON_SCHEMA", "REGEX", "CHOICE", "GRAMMAR")),
        ),
        "tests/plugins/llguidance/test_engine.py::test_a_grammar_allows_its_answers_alone",
    ),
    "Scoring.SOFTMAX": _ROUTES + "test_weights_and_experts_are_those_of_each_token_by_itself",
    "Scoring.SIGMOID": _ROUTES + "test_weights_and_experts_are_those_of_each_token_by_itself",
    **dict.fromkeys(
        ("Step.saved", "StepInputs.saved"),
        "tests/core/engine/test_states.py::test_a_step_that_saves_states_is_replayed",
    ),
    **dict.fromkeys(
        ("Batch.kv", "KVLayer.state"),
        "tests/models/test_lfm2_engine.py::test_preempted_rows_compute_their_states_again",
    ),
    # operations
    "Stream.normed": _LAYERS + "test_whole_layers",
    "Stream.shared": "tests/plugins/triton_ops/interpreted/layers.py::test_whole_layers",
    **dict.fromkeys(
        (f"Variant.{each.name}" for each in Variant),
        "tests/core/ops/test_bound.py::"
        "test_each_variant_is_named_to_the_operations_that_it_changes",
    ),
}
"""Name -> the test that fails where the name is not honoured."""

WAITING: Mapping[str, str] = {
    "GroupQuery.window": "workspaces for the tokens that a group keeps",
}
"""Name -> the feature that will first use it."""

UNUSED: Mapping[str, str] = {
    "headstock.nn.config_keys.HARMLESS": "the table behind `ignored_fields`, which the guide names",
    "headstock.nn.config_keys.UNSERVED": "the table behind refusals, which the guide names",
    "headstock.nn.decoder.forward": "for families that add to the decoder",
    "headstock.nn.decoder_config.DTYPES": "the types that families may name",
    "headstock.nn.decoder_config.FIELDS": "what `decoder_config` reads of config.json",
    "headstock.nn.decoder_config.make_layers": "for families with layers of several kinds",
    **dict.fromkeys(
        (
            f"headstock.nn.moe.{name}"
            for name in ("has_grouped_mm", "run_experts_grouped", "run_experts_one_by_one")
        ),
        "the two ways of `mix_experts`, which sets compare themselves with",
    ),
    **dict.fromkeys(
        (f"headstock.nn.noise.{name}" for name in ("philox", "random_words")),
        "the noise that every set of operations must make",
    ),
    "headstock.nn.penalties.token_counts": "the meaning of penalties",
    **dict.fromkeys(
        (
            f"headstock.ops.{name}"
            for name in (
                "fbgemm_ops.FbgemmOps",
                "fbgemm_ops.HalfWeight",
                "fbgemm_ops.SMALL_PRODUCT",
                "fbgemm_ops.fits_float16",
                "onednn_ops.KERNEL_BYTES",
                "onednn_ops.LengthWeight",
                "onednn_ops.round_rows",
            )
        ),
        "for sets that derive from those of CPUs",
    ),
}
"""Name of a library that no other module of headstock uses -> whom it is for."""
