"""Known traps of activation checkpointing by number: the symptom, and the tests for it.

A trap without a test says "not yet: " and what is missing.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
TRAPS = {
    1: """LoRA: no element requires grad, or adapters stay untrained
        users/test_peft.py::test_every_adapter_trains
        attach/test_reenabling.py::test_what_others_accept_in_silence_is_refused_with_the_reason
    """,
    2: """the policy is silently replaced by plain full
        attach/test_reenabling.py::test_the_plan_survives_generation_in_trl
        users/test_peft.py::test_the_plan_survives_kbit_preparation
        users/test_trainer.py::test_the_plan_survives_a_second_train
    """,
    3: """a hook on the wrong object is bypassed, drops kwargs or raises
        users/test_peft.py::test_the_hook_is_where_every_caller_finds_it
        users/test_trainer.py::test_a_nested_spec_reaches_the_blocks_from_the_command_line
    """,
    4: """DDP: marked as ready twice
        users/test_ranks.py::test_ddp_trains_as_without_hf_ckpt
        users/test_ranks.py::test_ddp_fails_with_reentrant_checkpointing
    """,
    5: """dropout is drawn again, so the gradients belong to another sample
        users/test_peft.py::test_dropout_that_an_adapter_brings_later_is_drawn_once
        attach/test_reenabling.py::test_accelerates_own_checkpointing_is_a_second_owner
        attach/test_take_off.py::test_uninstall_after_someone_wrapped_a_block
    """,
    6: """ZeRO-3 with frozen parameters: recomputed shape [0]
        users/test_deepspeed.py::test_frozen_parameters_under_an_old_zero3_are_refused
        users/test_deepspeed.py::test_zero_trains_as_without_hf_ckpt
    """,
    7: """generate() in train mode gives other tokens
        attach/test_generation.py::test_generate_in_train_mode_gives_the_same_tokens
        attach/test_generation.py::test_a_loop_shaped_like_grpo
    """,
    8: """FSDP: two owners of checkpointing, and redundant all-gathers
        users/test_configs.py::test_exactly_one_owner_of_checkpointing
        users/test_ranks.py::test_a_second_owner_under_accelerates_fsdp2_is_refused
        users/test_ranks.py::test_fsdp2_trains_as_without_hf_ckpt
    """,
    9: """FSDP2 wrapped each child of the layer, or nothing
        users/test_ranks.py::test_fsdp2_trains_as_without_hf_ckpt
    """,
    10: """the KV cache is written twice
        attach/test_caches.py::test_no_block_sees_a_cache
        attach/test_caches.py::test_a_cache_of_the_caller_is_left_out_or_refused
        attach/test_caches.py::test_blocks_get_no_cache_under_any_name
        users/test_peft.py::test_prefix_tuning
    """,
    11: """one unrelated key means reentrant
        attach/test_reenabling.py::test_checkpointing_is_never_reentrant
    """,
    12: """memory does not move because logits are the peak
        planner/test_choose.py::test_an_error_names_what_fills_the_lowest_peak_and_what_would_lower_it
        users/test_trainer.py::test_logits_that_are_the_peak_are_said_once
    """,
    13: """selective that is really full
        engines/test_sac.py::test_attention_is_not_run_again
    """,
    14: """a budget on saved bytes is not one on the peak
        training/test_budgets_held.py::test_budgets_hold
        planner/test_choose.py::test_a_choice_is_as_fast_as_the_best_that_fits
    """,
    15: """every_n_layers counts encoder and decoder with one counter, and takes 0, -1 and 1.5
        attach/test_reenabling.py::test_every_n_layers_counts_each_stack
        attach/test_reenabling.py::test_what_others_accept_in_silence_is_refused_with_the_reason
    """,
    16: """offloading does not lower the peak, or moves masks
        costs/test_costs.py::test_peaks_with_host_memory_are_those_that_are_reached
        costs/test_costs.py::test_a_plan_moves_only_what_it_has_to
        parity/test_matrix.py::test_gradients_are_those_of_no_checkpointing
    """,
    17: """asynchronous offloading: NaN, leaks, use after free, silent rounding
        engines/test_offload_host_memory.py::test_what_comes_back_has_the_bits_it_left_with
    """,
    18: """a frozen prefix pays for hooks on embeddings, which pile up
        users/test_peft.py::test_a_frozen_prefix_does_not_pay
        attach/test_reenabling.py::test_hooks_on_embeddings_do_not_pile_up
        attach/test_reenabling.py::test_hooks_on_embeddings_that_lost_their_handle_before_install
    """,
    19: """training arguments with a callable, and enabled models, cannot be saved
        users/test_trainer.py::test_training_arguments_with_a_spec_are_saved_and_copied
        users/test_trainer.py::test_a_nested_spec_reaches_the_blocks_from_the_command_line
        attach/test_saving.py::test_an_enabled_model_copies_and_pickles
        attach/test_saving.py::test_a_disabled_model_pickles_too
    """,
    20: """operations in place inside a region
        engines/test_in_place.py::test_what_trains_without_checkpointing_trains_with_it
        engines/test_in_place.py::test_the_warning_names_block_and_operation
        engines/test_in_place.py::test_a_trial_leaves_nothing_behind
        engines/test_in_place.py::test_what_cannot_be_helped_is_told_with_the_block
        engines/test_in_place.py::test_under_the_users_hooks_nothing_is_dropped
        engines/test_in_place.py::test_what_is_changed_in_place_is_not_offloaded
        engines/test_in_place.py::test_memory_that_runs_out_in_a_trial_is_no_proof
    """,
    21: """T5: a position bias shared by all blocks, and attention modules that carry the flag
        attach/test_between_blocks.py::test_only_t5_blocks_are_driven
        attach/test_between_blocks.py::test_the_shared_position_bias_crosses_the_plan
    """,
    22: """attentions, hidden states, cross-attention lost or shifted
        attach/test_between_blocks.py::test_hidden_states_in_the_loss
        attach/test_between_blocks.py::test_attentions_in_the_loss
        attach/test_between_blocks.py::test_gpt2_cross_attention
        attach/test_between_blocks.py::test_bert_as_a_decoder
    """,
    23: """a quantised base: k-bit preparation casts norms up and enables on its own
        users/test_quantised.py::test_lora_on_a_quantised_base
        users/test_quantised.py::test_preparing_for_kbit_training_does_not_keep_the_plan_off
    """,
    24: """adapters in eval mode run out of memory; validation in train mode recomputes
        attach/test_reenabling.py::test_eval_mode_with_gradients_is_said_once
        attach/test_reenabling.py::test_evaluation_neither_warns_nor_recomputes
    """,
    25: """use_cache warnings every step, and a saved config without a cache
        attach/test_caches.py::test_two_steps_without_a_warning
    """,
    26: """remote code in the old format
        models/test_blocks.py::test_a_model_without_blocks_names_the_known_families
        models/test_blocks.py::test_remote_code_with_blocks_is_generic
    """,
    27: """pinned memory rounds to powers of two, and runs out
        engines/test_offload_host_memory.py::test_a_host_budget_counts_powers_of_two
        engines/test_offload_host_memory.py::test_memory_that_cannot_be_pinned_and_is_rounded_up
    """,
    28: """out of memory: the batch is halved, or hours are lost
        training/test_guard.py::test_any_point_of_a_step
        training/test_guard.py::test_a_planned_policy_is_planned_again_for_less
        training/test_guard.py::test_out_of_plans
    """,
    29: """a resumed run has its optimizer state before the first forward
        training/test_callback.py::test_row_29_resume_equals_one_run_also_with_another_policy
        users/test_trainer.py::test_a_resumed_run_is_measured_with_the_optimizer_state_that_is_there
    """,
    30: """keys of a state dict get a `_checkpoint_wrapped_module.`
        attach/test_saving.py::test_state_dict_keys_stay_as_they_are
        users/test_peft.py::test_keys_of_adapters_stay_as_they_are
    """,
    31: """random state cannot be read while a CUDA graph is captured
        engines/test_random_state.py::test_random_state_while_a_graph_is_captured
    """,
    32: """DeepSpeed's own block does nothing for Hugging Face models
        doctor/test_doctor.py::test_a_fault_is_found_and_its_twin_is_not
        users/test_deepspeed.py::test_deepspeeds_own_block_does_nothing
    """,
    33: """routing of mixtures of experts flips at recomputation
        engines/test_routers.py::test_tokens_go_to_the_same_experts
        engines/test_routers.py::test_selective_keeps_what_was_chosen
        forecast/test_peaks.py::test_predicted_peaks_are_those_of_real_steps
    """,
    34: """torch.compile: graph breaks, warnings, a policy that is ignored
        users/test_compile.py::test_a_compiled_model_trains_the_same_and_saves_less
        users/test_compile.py::test_less_than_the_partitioner_saves_by_itself
        users/test_compile.py::test_not_compiled_again
    """,
    35: """misspelt keys are accepted in silence
        attach/test_reenabling.py::test_what_others_accept_in_silence_is_refused_with_the_reason
        spec/test_spec.py::test_one_clear_error
    """,
    36: """parameters, adapters or the mode change between forward and backward
        parity/test_matrix.py::test_gradients_are_those_of_no_checkpointing
        parity/test_matrix.py::test_each_change_would_show
        engines/test_state.py::test_values_that_are_gone_are_a_named_error
    """,
    37: """the trainer computes the loss itself, so the plan is for another program
        training/test_budgets_held.py::test_budgets_hold
    """,
    38: """a budget that fits early batches ends the run at the first long one
        training/test_session.py::test_where_no_plan_fits_the_run_goes_on_with_the_least
        training/test_session.py::test_shorter_batches_take_the_plan_of_longer_ones_and_get_their_own
    """,
    39: """caches of an outer model are taken for prefix tuning
        attach/test_caches.py::test_a_cache_of_the_model_itself_is_no_prefix
    """,
    40: """running statistics of BatchNorm move twice under `full`
        parity/test_matrix.py::test_gradients_are_those_of_no_checkpointing
        engines/test_state.py::test_a_graph_that_is_kept_runs_again_from_the_same_buffers
        training/test_verify.py::test_buffers_are_compared_and_put_back
    """,
    41: """nn.DataParallel: a replica uses the weights of another device
        engines/test_head_models.py::test_a_copy_of_data_parallel_is_an_error
    """,
    42: """a full disk or a read-only folder ends the training, and leaves half of a file
        training/test_callback_files.py::test_a_file_that_cannot_be_written_is_warned_of_once
        spec/test_files.py::test_a_full_disk_leaves_the_plan_that_was_there
    """,
    43: """a filled cache under its new name, `cache`, gets past the guard
        attach/test_caches.py::test_a_cache_of_the_caller_is_left_out_or_refused
    """,
    44: """parameters are frozen, unfrozen, cast or added between steps, and the old plan breaks the budget
        training/test_session.py::test_a_model_that_changes_is_measured_again
    """,
    45: """a walk over all objects of Python breaks tuples that other threads build
        training/test_session.py::test_micro_steps_are_planned_for_with_gradients
    """,
    46: """second derivatives through the head or feed-forwards in chunks are wrong
        engines/test_every_engine.py::test_a_second_derivative_of_chunks_is_refused
    """,
    47: """a graph that blocks share ignores hooks that came later, or that another model has
        engines/test_compiled.py::test_hooks_inside_a_block_are_called
    """,
    48: """draws from Python's `random` or numpy inside a block are others when it is recomputed
        engines/test_random_state.py::test_a_block_draws_the_same_numbers_again
        engines/test_random_state.py::test_a_part_of_a_block_draws_the_same_numbers_again
    """,
    49: """a torch checkpoint inside a block ends the run under `selective`
        engines/test_rebuild_hooks.py::test_the_users_own_checkpoint_inside_a_block
    """,
    50: """noise behind a softmax is taken for a dropout mask
        engines/test_masks.py::test_nothing_else_is_packed
        engines/test_masks.py::test_only_the_first_forward_compares_masks
    """,
    51: """a metrics file that is a pipe is waited for for ever
        training/test_callback_files.py::test_a_file_that_cannot_be_written_is_warned_of_once
    """,
    52: """TRL forces `use_reentrant=True`, and the user is refused for what they never wrote
        users/test_deepspeed.py::test_the_refusal_names_reentrant_checkpointing_where_it_was_asked_for
    """,
    53: """files of TRL, axolotl and LLaMA-Factory are read by the wrong rules
        doctor/test_doctor.py::test_the_same_qlora_is_the_same_training_in_each_program
        forecast/test_answer.py::test_a_question_has_its_answer
    """,
}
"""Number -> a line with the symptom, then a line for each test or for what is missing."""
ROWS = {number: [line.strip() for line in text.strip().splitlines()] for number, text in TRAPS.items()}
NAMED = sorted({line for _, *lines in ROWS.values() for line in lines if "::" in line})


def test_every_trap_has_a_test_or_says_what_is_missing():
    assert list(ROWS) == [*range(1, 54)]
    for number, (symptom, *lines) in ROWS.items():
        assert "::" not in symptom, number
        assert lines, number
        assert all("::" in line for line in lines) or (len(lines) == 1 and lines[0].startswith("not yet: ")), number


def marks(decorators: list[ast.expr]) -> set[str]:
    """The pytest marks in an expression or a list of decorators, such as `skip` in `pytest.mark.skip("later")`."""
    nodes = [node for decorator in decorators for node in ast.walk(decorator)]
    return {node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pytest.mark"}


@pytest.mark.parametrize("test", NAMED)
def test_a_named_test_exists_and_is_not_skipped(test):
    file, _, name = test.partition("::")
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    (function,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    of_the_file = [node.value for node in assigned if ast.unparse(node.targets[0]) == "pytestmark"]
    assert name.startswith("test_")
    assert not marks([*function.decorator_list, *of_the_file]) & {"skip", "xfail"}
    assert "assert" in ast.unparse(function) or "pytest.raises" in ast.unparse(function)
