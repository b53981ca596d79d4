"""The routing benchmark: its replicas keep their books, and the default policy is the best where it should be."""

import argparse
import dataclasses
import itertools
import json
from pathlib import Path

import pytest

from phalanx.launch.bench import steps
from phalanx.launch.bench.errors import BenchError
from phalanx.launch.bench.report import ReportWriter
from phalanx.launch.bench.routing import command, measure
from phalanx.launch.bench.routing.load import MADE_UP, Load, from_trace, turns
from phalanx.launch.bench.routing.service import ASSUMED, read_service, speed
from phalanx.launch.bench.routing.simulation import Cluster, simulate
from phalanx.launch.bench.routing.throughput import BOUND, Window, throughput_at, widen
from phalanx.launch.bench.traces import SHAPES, synthesize_trace
from support.launch import TINY_MODEL


def make_cluster(dp: int = 4, front_ends: int = 1, delay_s: float = 0.0, kv_tokens: int = 600_000) -> Cluster:
    service = dataclasses.replace(ASSUMED, capacity_tokens=kv_tokens)
    return Cluster(
        data_parallel_size=dp, service=service, num_front_ends=front_ends, snapshot_delay_s=delay_s
    )


def made_up(name: str, num_requests: int = 600, dp: int = 4) -> Load:
    return MADE_UP[name](num_requests, measure.RATES[name] * dp, 1)


@pytest.mark.parametrize("policy", measure.POLICIES)
@pytest.mark.parametrize("name", ["multi-turn", "heavy-tail"])
def test_every_request_gets_all_its_tokens_under_every_policy(name: str, policy: str) -> None:
    # So little memory that requests are preempted.
    cluster, load = make_cluster(2, front_ends=2, delay_s=0.2, kv_tokens=70_000), made_up(name, 150, 2)

    outcome = simulate(load, cluster, measure.router_maker(policy, cluster, load.block_tokens))

    assert len(outcome.jobs) == load.num_requests
    for job in outcome.jobs:
        assert job.arrived_at < job.first_token_at <= job.finished_at
        assert job.done_tokens == job.request.num_output_tokens
    expected = sum(job.request.num_output_tokens for job in outcome.jobs)
    computed = sum(job.request.num_prompt_tokens for job in outcome.jobs) - outcome.hit_tokens
    if outcome.num_preemptions == 0:
        assert sum(outcome.replica_tokens) == expected + computed


def test_the_same_seed_gives_the_same_run() -> None:
    runs = [measure.measure(made_up("multi-turn", 200), "prefix_aware", make_cluster()) for _ in range(2)]

    assert len({run.ttft_p99_s for run in runs}) == 1
    assert len({run.hit_rate for run in runs}) == 1


def test_turns_of_a_session_begin_with_all_that_was_said() -> None:
    _, first = made_up("multi-turn", 100).arrivals[0]
    chain = list(turns(first))

    for earlier, later in itertools.pairwise(chain):
        assert later.keys[: len(earlier.keys)] == earlier.keys


@pytest.mark.parametrize("name", ["multi-turn", "shared-prefix"])
def test_with_reuse_the_default_finds_prefixes_and_beats_policies_that_look_at_load_only(name: str) -> None:
    load, cluster = made_up(name), make_cluster()
    ours, kv_aware, round_robin = (
        measure.measure(load, policy, cluster) for policy in ("prefix_aware", "kv_aware", "round_robin")
    )

    assert ours.hit_rate > max(kv_aware.hit_rate, round_robin.hit_rate) + 0.1
    assert ours.ttft_p99_s < min(kv_aware.ttft_p99_s, round_robin.ttft_p99_s)


@pytest.mark.parametrize("name", ["no-reuse", "heavy-tail", "burst"])
def test_without_reuse_the_default_is_as_good_as_the_best_that_looks_at_load_only(name: str) -> None:
    load, cluster = made_up(name), make_cluster()
    ours = measure.measure(load, "prefix_aware", cluster)
    others = [
        measure.measure(load, policy, cluster).ttft_p99_s
        for policy in ("kv_aware", "least_loaded", "round_robin", "power_of_two")
    ]

    assert ours.ttft_p99_s <= 1.05 * min(others)


def test_a_trace_is_brought_to_the_rate_that_is_wanted() -> None:
    trace = synthesize_trace(SHAPES["mooncake-conversation"], 300, 0)
    load = from_trace("trace", trace, 30.0)

    assert load.arrivals[-1][0] == pytest.approx(10.0)
    assert load.num_requests == 300


def test_unknown_names_are_refused_with_those_that_are_known() -> None:
    with pytest.raises(BenchError, match=r"--policies: 'best' is none of prefix_aware"):
        command._known(("best",), measure.POLICIES, "--policies")


@pytest.mark.parametrize("name", ["multi-turn", "no-reuse"])
def test_several_front_ends_choose_nearly_as_well_as_one(name: str) -> None:
    load = made_up(name)
    alone, together = (
        measure.measure(load, "prefix_aware", make_cluster(front_ends=count, delay_s=0.2)).ttft_p99_s
        for count in (1, 8)
    )

    assert together <= 1.2 * alone


def test_chats_are_answered_sooner_than_by_any_other_policy() -> None:
    # Not one of the seeds that the policy was tuned on.
    load, cluster = MADE_UP["multi-turn"](1500, measure.RATES["multi-turn"] * 8, 21), make_cluster(8)
    found = {
        policy: measure.measure(load, policy, cluster).ttft_p99_s
        for policy in ("prefix_aware", "sglang-cache", "llm-d", "aibrix", "dynamo")
    }

    assert min(found, key=found.__getitem__) == "prefix_aware"


@pytest.mark.parametrize("name", ["shared-prefix", "tenant-chats"])
def test_no_policy_does_better_than_one_replica_as_wide_as_all_of_them(name: str) -> None:
    window = Window(slo_s=1.0, warmup_s=2.0, window_s=3.0)
    found = {
        policy: throughput_at(name, 1, policy, make_cluster(2), window, 2 * measure.RATES[name])
        for policy in ("prefix_aware", "round_robin", BOUND)
    }

    assert all(one.ttft_p99_s <= 1.0 for one in found.values())
    assert found["prefix_aware"].requests_per_s <= 1.05 * found[BOUND].requests_per_s
    assert found["round_robin"].requests_per_s <= 1.05 * found[BOUND].requests_per_s


def test_one_wide_replica_has_the_means_of_all() -> None:
    cluster = make_cluster(4, front_ends=2, delay_s=0.1)
    wide = widen(cluster)

    assert (wide.data_parallel_size, wide.num_front_ends, wide.snapshot_delay_s) == (1, 1, 0.0)
    assert wide.service.capacity_tokens == 4 * cluster.service.capacity_tokens
    # As many tokens a second, in steps as long.
    before, after = cluster.service, wide.service
    assert after.max_num_batched_tokens == 4 * before.max_num_batched_tokens
    assert after.cost.base_s == before.cost.base_s
    assert after.cost.prefill_token_s == pytest.approx(before.cost.prefill_token_s / 4)


def test_one_command_writes_all_tables(tmp_path: Path) -> None:
    words = [
        "--requests",
        "40",
        "--loads",
        "shared-prefix,azure-code",
        "--policies",
        "prefix_aware,round_robin",
    ]
    words += ["--dp", "2,3", "--delays-ms", "0,100", "--seeds", "1,2"]
    words += ["--ttft-slo-s", "1", "--warmup-s", "1", "--window-s", "2"]
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)

    command.run(parser.parse_args(words), ReportWriter(words, tmp_path / "r"))

    report = json.loads((tmp_path / "r.json").read_text())
    titles = [table["title"] for table in report["tables"]]
    assert titles[0] == "dp 2, front ends: 1, snapshots 0 ms on their way"
    assert titles[1].startswith("Requests a second at a p99 of TTFT of 1 s")
    assert [row[0] for row in report["tables"][1]["rows"]] == ["prefix_aware", "round_robin", "bound"]
    assert [row[0] for row in report["tables"][2]["rows"]] == [
        "shared-prefix, dp 2, front ends: 1, snapshots 0 ms on their way",
        "shared-prefix, dp 3, front ends: 1, snapshots 0 ms on their way",
        "shared-prefix, dp 2, front ends: 1, snapshots 100 ms on their way",
    ]
    # Two policies: two seeds of the first cell, one of the others; the trace is not there. Throughput: two seeds, and
    # the bound as well.
    assert len(report["runs"]) == 2 * (2 + 1 + 1) + 3 * 2


def test_replicas_are_like_the_engine_that_was_measured(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    steps.add_arguments(parser)
    words = ["--model", str(TINY_MODEL), "--device", "cpu", "--cpu-time", "--steps", "48"]
    words += ["--max-requests", "4", "--max-prompt", "64", "--max-batched-tokens", "64"]

    steps.run(parser.parse_args(words), ReportWriter(words, tmp_path / "steps"))
    service, source = read_service(tmp_path / "steps.json")

    assert service.cost.base_s + service.cost.decode_token_s > 0
    assert service.cost.prefill_token_s > 0
    assert (service.max_num_batched_tokens, service.max_num_seqs) == (64, 4)
    assert "tiny-llama on" in source
    assert 0 < speed(service) < float("inf")


def test_what_is_no_result_of_a_measurement_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"benchmark": "ring", "date": "today", "runs": []}')

    with pytest.raises(BenchError, match=r"--service: .* is no result of cluster-bench steps"):
        read_service(tmp_path / "x.json")


def test_a_request_that_no_replica_can_hold_is_named() -> None:
    load = made_up("heavy-tail", 50)

    with pytest.raises(
        BenchError, match=r"heavy-tail: a request takes \d+ tokens, and the KV cache has 1000"
    ):
        measure.measure(load, "round_robin", make_cluster(kv_tokens=1000))
