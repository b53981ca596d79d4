"""Faults that engines of this kind are known for, and the tests that keep them out of this one.

A fault has a line here when it was reported somewhere and its kind must be impossible: a test that is renamed or
removed takes its line along, or finds that it is missed.
"""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FAULTS: dict[str, list[str]] = {
    # Stop and length
    "min_tokens above what the context holds keeps a request for ever": [
        "engine/test_scheduler.py::test_min_tokens_never_keeps_a_request_from_ending_at_the_context"
    ],
    "a stop string stops within min_tokens; the first of the list wins, not the first in the text": [
        "engine/test_detokenizer.py::test_the_match_that_completes_first_wins"
    ],
    "a stop string inside a token is not seen": [
        "engine/test_detokenizer.py::test_a_stop_string_inside_one_token_ends_the_text_before_it"
    ],
    "a stop string before the end token of one step is not looked for": [
        "engine/test_output_processor.py::test_a_stop_string_before_the_end_token_of_one_step_wins"
    ],
    "only one of n samples survives in a collector, or samples run with other parameters": [
        "engine/test_output_processor.py::test_a_slow_reader_loses_no_sample",
        "engine/test_output_processor.py::test_samples_differ_in_their_seed_alone",
    ],
    # Text
    "the prompt leaks into the output when it ends inside a character": [
        "engine/test_detokenizer.py::test_a_prompt_that_ends_inside_a_character_is_not_shown"
    ],
    "text offsets miss the space that a text loses at its beginning, or special tokens of the prompt": [
        "launch/test_server_logprobs.py::test_offsets_are_places_in_the_text_whatever_stands_before_it",
        "launch/test_server_logprobs.py::test_the_tokens_of_an_echoed_prompt_divide_its_text_among_them",
    ],
    "two ids of one text are one entry": ["engine/test_logprobs.py::test_two_ids_of_one_text_stay_two"],
    "prompt log-probabilities are lost or doubled by chunks, preemption or a prefix hit": [
        "engine/test_sampling_in_flight.py::"
        "test_prompt_logprobs_are_whole_after_chunks_preemption_and_a_prompt_that_is_cached"
    ],
    "a chat begins with two begin tokens": [
        "engine/test_input_processor.py::test_a_chat_is_rendered_without_further_special_tokens"
    ],
    # Grammars
    "a stop token inside a string ends an unfinished document": [
        "engine/test_grammar.py::"
        "test_an_end_token_whose_text_fits_into_a_string_is_held_back_until_the_grammar_is_complete"
    ],
    "a keyword of a schema is ignored in silence": [
        "engine/test_grammar.py::test_a_schema_is_kept_to_or_refused_never_kept_to_in_part"
    ],
    "taking back an end token takes back a real one": [
        "engine/test_grammar.py::test_taking_back_any_number_of_tokens_leads_back_to_the_same_masks"
    ],
    "a mask is asked for after the end, and that is an error": [
        "engine/test_grammar.py::test_after_its_end_a_grammar_allows_ends_and_nothing_else",
        "engine/test_steps_in_flight.py::"
        "test_a_step_whose_constrained_requests_have_all_ended_gets_its_empty_masks",
    ],
    "a grammar that does not compile ends the engine": [
        "engine/test_grammar.py::test_a_compilation_that_fails_is_that_requests_affair_alone",
        "engine/test_grammar.py::test_compilations_without_end_are_given_up_and_hold_up_nobody",
        "engine/test_grammar.py::test_a_specification_has_one_form_that_is_not_empty",
    ],
    "min_tokens and a finished grammar leave nothing to sample": [
        "engine/test_steps_in_flight.py::test_a_request_with_a_grammar_steps_aside_until_it_is_ready",
        "workers/test_sampler.py::test_no_mask_empties_a_row",
    ],
    # KV cache
    "two prompts, salts or kinds of keys have one hash": [
        "engine/test_kv_cache_manager.py::test_hashes_tell_prefixes_kinds_and_lengths_apart",
        "engine/test_kv_events.py::test_prompts_of_different_salts_share_nothing_and_of_equal_ones_all",
        "launch/test_server.py::test_priority_salt_and_timeout_reach_the_engine_from_every_endpoint",
    ],
    "slots are taken for contiguous behind a prefix hit": [
        "workers/test_paged_attention.py::test_attention_is_a_softmax_over_the_tokens_that_a_query_sees"
    ],
    "a prompt that is cached to its end leaves nothing to compute": [
        "engine/test_scheduler.py::test_a_full_hit_of_an_aligned_prompt_still_computes_one_block"
    ],
    "lengths are fixed before a resumed request has its hit": [
        "engine/test_scheduler.py::"
        "test_a_preempted_request_that_finds_its_own_blocks_computes_only_what_is_missing"
    ],
    "a victim of preemption was scheduled in the same step, or another request is skipped": [
        "engine/test_scheduler.py::test_the_most_urgent_request_is_preempted_last_wherever_it_was_admitted",
        "engine/test_steps_in_flight.py::test_any_stream_of_requests_gives_what_each_gives_alone",
    ],
    "the cache keeps blocks in use that nobody uses": [
        "engine/test_trace_simulation.py::test_ten_thousand_requests_come_out_whole_in_order_and_leave_nothing"
    ],
    "an abort that comes with the last token is a normal end": [
        "engine/test_core.py::test_an_abort_that_comes_while_the_last_step_runs_wins_over_its_end"
    ],
    "blocks are reused while a step in flight writes to them": [
        "engine/test_steps_in_flight.py::"
        "test_blocks_of_a_request_that_ended_are_given_to_others_while_its_last_step_is_in_flight",
        "engine/test_windowed_models.py::test_long_requests_are_exact_in_a_cache_that_holds_their_windows",
    ],
    # Steps in flight
    "a preempted request loses or doubles the token that was on its way": [
        "engine/test_steps_in_flight.py::"
        "test_a_preempted_request_waits_for_its_token_in_flight_and_gets_it_once"
    ],
    "a reset of the cache with a step in flight": [
        "engine/test_steps_in_flight.py::test_a_reset_with_a_step_in_flight_leaves_nothing_that_can_be_hit"
    ],
    "penalties and bad words see placeholders, or miss the last token": [
        "engine/test_sampling_in_flight.py::test_penalties_count_every_token_once_whatever_is_in_flight",
        "engine/test_sampling_in_flight.py::test_bad_words_end_with_the_token_that_is_made_last",
    ],
    # Requests
    "a request that is sent twice runs twice": [
        "engine/test_core.py::test_a_request_that_is_known_stays_as_it_is"
    ],
    "a request of an older attempt goes on beside the newer one": [
        "engine/test_core.py::test_a_newer_attempt_replaces_an_older_one",
        "engine/test_steps_in_flight.py::"
        "test_a_newer_attempt_takes_no_token_of_a_step_that_computed_the_older_one",
    ],
    "what is made for an aborted request goes to the next one of the same id": [
        "engine/test_async_llm.py::test_an_id_used_again_after_an_abort_gets_nothing_of_the_request_before"
    ],
    "a request that lost its replica is refused by the full queue of another": [
        "engine/test_scheduler.py::test_a_request_that_another_replica_has_begun_is_taken_into_a_full_queue"
    ],
    "a deadline does not count while no replica serves": [
        "cluster/test_dp_client.py::test_the_deadline_of_a_request_counts_also_while_it_waits_for_a_replica"
    ],
    "what an engine core cannot decode waits for ever": [
        "engine/test_input_processor.py::"
        "test_an_option_of_the_wrong_kind_is_refused_before_an_engine_core_sees_it",
        "engine/test_async_llm.py::test_what_no_engine_core_could_read_is_refused_with_its_field",
    ],
    "the thread that publishes KV events dies and nobody hears of it": [
        "engine/test_kv_event_publisher.py::test_a_thread_that_fails_says_so"
    ],
    "an engine that two tasks start at once is connected twice": [
        "engine/test_async_llm.py::test_starts_at_the_same_time_connect_once"
    ],
    "requests of a front end that is dead run for nobody": [
        "engine/test_core_loop.py::"
        "test_what_a_front_end_has_sent_before_its_death_and_comes_after_it_is_for_nobody"
    ],
    "an operator's call in the middle of a step ends the replica": [
        "engine/test_core_loop.py::test_what_the_parent_asks_while_a_step_is_under_way_is_done_after_it"
    ],
    "a full queue does not say when to come back": [
        "engine/test_scheduler.py::test_a_full_queue_says_when_to_come_back",
        "launch/test_server.py::test_an_error_before_the_first_token_has_a_status_of_its_own",
    ],
    "requests of better priority hold one up for ever": [
        "engine/test_request_queue.py::test_better_priorities_overtake_the_oldest_request_only_so_often",
        "engine/test_trace_simulation.py::test_under_pressure_nobody_who_decodes_waits_and_nobody_starves",
    ],
    "an error within a stream looks like its end": [
        "launch/test_server.py::test_an_error_within_a_stream_is_an_event_and_the_stream_ends"
    ],
    "a body that is no object is the server's error": [
        "launch/test_server.py::test_a_body_that_is_no_json_object_is_400"
    ],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_known_fault_has_its_tests(fault: str) -> None:
    for name in FAULTS[fault]:
        file, _, function = name.partition("::")
        tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
        defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert function in defined, f"{file} has no {function}"
